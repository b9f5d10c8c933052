"""Matrix products that overlap with the communication that they need, or that needs them."""
