"""Images, decoded before or while a run trains, and their augmentation."""
