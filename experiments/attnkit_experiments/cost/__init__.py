"""What a model and its data cost: parameters, time, memory, images per second."""
