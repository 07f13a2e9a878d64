"""python -m trainer_hooks.train: the same program as `rollout train`, in the form for torchrun."""

from trainer_hooks.train.main import main

if __name__ == "__main__":
    main()
