"""What was tuned for an AllToAll; see `tilescale_net.tuning`."""

from tilescale_net.kernels.moe.config import Config
from tilescale_net.kernels.moe.tuning import Tuning
from tilescale_net.runtime import tuned

# Fields of Tuning that may be tuned: symmetric memory does not depend on them.
TUNED = ("blocks", "threads", "dispatch_senders", "combine_senders", "combine_threads")


def key_of(config: Config) -> str:
    """Of objects that one choice serves: up to the next power of two of tokens."""
    c = config
    dtypes = " ".join(str(d).removeprefix("torch.") for d in (c.dtype, c.combine_dtype))
    return (
        f"moe {c.mode} {c.layout} {dtypes} quantize={c.quantize_combine} experts={c.num_experts} top_k={c.top_k} "
        f"hidden={c.hidden} tokens<={tuned.up_to(c.max_tokens)}"
    )


def chosen(config: Config, world) -> Tuning:
    """What was tuned for a configuration, else the default. Collective the first time in a world."""
    key = key_of(config)
    choice = tuned.of(world, "AllToAll").get(key)
    if choice is not None:
        try:
            if unknown := choice.keys() - {*TUNED}:
                raise ValueError(f"it names {', '.join(sorted(unknown))}")
            found = Tuning(**choice)  # type: ignore[arg-type]
            found.resolved(config, world.device)
            return found
        except (TypeError, ValueError) as err:  # on all ranks alike
            tuned.ignore(world, key, err)
    return Tuning()
