"""vLLM's plug-in: attention on CPUs by CLAttn."""


def register() -> None:
    """Takes the place of vLLM's CPU backends; vLLM calls this in each of its processes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "clattn_vllm.backend.CLAttnBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, "clattn_vllm.mla.CLAttnMLABackend")
    register_backend(AttentionBackendEnum.AMX_MLA, "clattn_vllm.mla.CLAttnAMXMLABackend")
