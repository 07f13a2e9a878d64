"""Entry point of `python -m trainer_hooks.train`: `rollout train` as a module, for torchrun."""

from rollout.extras import extra_needed

with extra_needed("train", "trainer_hooks.train"):
    from trainer_hooks.train.command import main

if __name__ == "__main__":
    main()
