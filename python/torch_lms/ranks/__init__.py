"""Who takes part in a distributed run, and what its ranks tell each other on the host.

Note [Groups that outlive their end]: functions of `torch.distributed.nn` have the world's group as it is when they are
imported as the default of an argument. Imported after `init_process_group`, which torch.distributed.pipelining does,
they keep that group beyond `destroy_process_group`, and its threads with it. One of Gloo's threads that lets go of a
tensor while the interpreter ends then ends the process by SIGABRT ("terminate called without an active exception").
They are imported here, and so, in most programs, before there is a group.
"""

from contextlib import suppress
from importlib import import_module

with suppress(ImportError):  # PyTorch 1.12 without RPC has none of them, for nobody
    import_module("torch.distributed.nn.functional")
