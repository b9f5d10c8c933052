"""What a job does and where it waits: the report of a hang, and the timeline that TSN_TRACE writes."""
