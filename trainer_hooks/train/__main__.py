"""python -m trainer_hooks.train: the program that `rollout train` runs, as torchrun starts it."""

from trainer_hooks.train.main import main

if __name__ == "__main__":
    main()
