"""CudaIpcTransport: engines of this machine read a bucket in the memory of the trainer's GPU."""

from __future__ import annotations

from rollout.backends.memory.shared_buffer import DEVICE, require_place
from rollout.weights.transports.collective import BUCKET_BYTES, STALL_S, CollectiveTransport

KIND = "cuda_ipc"


class CudaIpcTransport(CollectiveTransport):
    """A WeightTransport as a CollectiveTransport is, without broadcasts: members map the sender's
    one bucket through CUDA IPC and copy from it; the sender fills it again when all have done so.

    `place` "host" has the bucket in shared host memory, for engines on a CPU.
    """

    kind = KIND

    def __init__(
        self,
        *,
        place: str = DEVICE,
        bucket_bytes: int = BUCKET_BYTES,
        stall_timeout_s: float = STALL_S,
        reject_non_finite: bool = True,
    ) -> None:
        """stall_timeout_s: how long the engines may take to read one bucket.

        Raises ConfigError if there is no such place.
        """
        require_place(place)
        super().__init__(
            backend=place,
            bucket_bytes=bucket_bytes,
            stall_timeout_s=stall_timeout_s,
            reject_non_finite=reject_non_finite,
        )
