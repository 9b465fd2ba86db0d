"""From what a user names as a model to a folder on this machine, before any process starts. No torch.

    parse("org/name@main")  ─▶ ModelSource     a folder, a name, or a repository of a Hugging Face hub
    resolve(source, …)      ─▶ ResolvedModel   its folder and, from a hub, the one commit that all processes serve

Files of a hub are in the cache of huggingface_hub, which other programs share; its environment variables hold
(HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""
