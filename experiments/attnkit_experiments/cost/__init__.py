"""The cost of a model: parameters, multiply-adds, time, memory."""
