"""What the compiled GPU kernels ask of a multiprocessor, counted in their machine code without a GPU."""
