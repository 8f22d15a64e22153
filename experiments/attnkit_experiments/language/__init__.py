"""Language models of bytes, causal or masked."""
