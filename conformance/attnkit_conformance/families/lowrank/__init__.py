"""SOFT, Nyström and Linformer attention."""
