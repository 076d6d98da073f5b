"""Stands in for SGLang's compiled kernels, which have no wheel for CPUs: SGLang takes its own
functions in PyTorch where the CPU has no kernels, but some of its modules import names all the
same. A call says which kernel was needed after all."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not available for this CPU")
    return missing
