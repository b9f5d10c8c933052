"""All ranks of a small job in one process, under every schedule: `python -m tilescale_net check`, see docs/simulator.md."""
