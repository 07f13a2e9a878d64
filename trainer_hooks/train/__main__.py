"""python -m trainer_hooks.train: the same program as `rollout train`, in the form for torchrun."""

from rollout.extras import extra_needed

with extra_needed("train", "trainer_hooks.train"):
    from trainer_hooks.train.main import main

if __name__ == "__main__":
    main()
