"""A real inference engine for CPU that speaks the SGLang or the vLLM dialect."""
