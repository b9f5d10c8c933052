"""Host side: world, heap, peer mapping, failures."""
