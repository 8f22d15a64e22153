"""What was judged, for people and for machines: pages, files, the terminal."""
