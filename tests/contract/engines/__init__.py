"""Installers and launchers of genuine vLLM and SGLang on a machine without a GPU."""
