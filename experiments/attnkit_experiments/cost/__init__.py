"""What a model costs: parameters, multiply-adds, time, memory."""
