"""What is trained on."""
