"""How long calls take: by the clock that `sf.tune` measures with."""

from seqfuse.tune.clock import Call, Clock, OnDevice, OnHost, Times, interleaved

__all__ = ["Call", "Clock", "OnDevice", "OnHost", "Times", "interleaved"]
