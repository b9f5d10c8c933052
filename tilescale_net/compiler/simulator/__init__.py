"""From a prepared kernel to one that runs on the CPU: guards, lines of errors, host code, its compiler and cache."""
