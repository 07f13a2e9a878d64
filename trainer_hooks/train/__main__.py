"""python -m trainer_hooks.train: the program that `rollout train` runs, as torchrun starts it."""

from rollout.extras import extra_needed

with extra_needed("train", "trainer_hooks.train"):
    from trainer_hooks.train.main import main

if __name__ == "__main__":
    main()
