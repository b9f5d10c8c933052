"""Activity and waits of a job: the report of a hang, and the timeline that TSN_TRACE writes."""
