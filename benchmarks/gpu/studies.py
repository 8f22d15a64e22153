"""What is trained on a GPU in minutes, by worth: studies of small models on data that fit into a checkout.

A job trains all cells of a study at once as far as the processes suffice; parts of a study, which have one name, are
read back as one report. Accuracies and losses are of these data, not of the papers': CIFAR-10 is a subset of half the
images, compressed again, and translation is of captions.
"""

from typing import NamedTuple

PROCESSES = 10
"""Trainings at once on one device, each of which leaves it idle most of the time."""
SHORTENED = 100
"""A rehearsal has this share of the steps, smaller batches, and shorter sequences."""


class Study(NamedTuple):
    """Cells of a recipe. `data`: a file or folder that is carried, or GENERATED; `rehearsal`: further settings of a
    rehearsal without a GPU.
    """

    name: str
    """The folder of its report, in docs/reports."""
    recipe: str
    preset: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    data: str
    steps: int
    rehearsal: tuple[str, ...]

    def words(self) -> tuple[str, ...]:
        """All of --set."""
        return (*self.settings, f"steps={self.steps}")

    def shortened(self) -> "Study":
        """The same cells, at a hundredth of the steps and with smaller batches."""
        return self._replace(settings=(*self.settings, *self.rehearsal), steps=max(self.steps // SHORTENED, 2))


GENERATED, DIGITS = "generated", "digits"  # data without a file
IMAGES, PAIRS, TEXT = "cifar10-held-out.zip", "multi30k", "reviews.txt.gz"
FAST = ("transformer", "reformer", "linformer", "performer", "nystromformer", "linear", "relu")
"""Methods beside SOFT, whose 20 steps of Newton's iteration over 512 landmarks are six times their arithmetic."""
CHOSEN = "{rates}"
"""The learning rate of each variant that was best in RATES, in the order of the variants."""
FEW_IMAGES = ("batch=16", "train_images=500", "test_images=100", "warmup=2")
FEW_PAIRS = ("tokens=256", "valid_pairs=40", "test_pairs=10", "analysed=1", "beam=2", "warmup=5")
EAGER = ("compile=false",)


def of_images(name: str, recipe: str, seeds: tuple[int, ...], epochs: int, *settings: str) -> Study:
    """Of 22,500 images, 512 in a step."""
    steps = round(epochs * 22_500 / 512)
    common = (*EAGER, f"warmup={steps // 10}", "checkpoint_every=500")
    return Study(name, recipe, "small", (*common, *settings), seeds, IMAGES, steps, FEW_IMAGES)


def of_pairs(name: str, recipe: str, seeds: tuple[int, ...], *settings: str) -> Study:
    """3,000 steps on captions, all 1,000 of the test split translated."""
    common = (*EAGER, "tokens=4096", "test_pairs=1000", "checkpoint_every=500")
    return Study(name, recipe, "small", (*common, *settings), seeds, PAIRS, 3000, FEW_PAIRS)


def listops(seed: int, *methods: str) -> Study:
    short = ("longer_than=50", "shorter_than=257", "length=256")
    small = ("batch=2", "train_samples=200", "valid_samples=20", "test_samples=20", "warmup=5", *short)
    settings = (*EAGER, f"methods={','.join(methods)}", "checkpoint_every=250")
    return Study("002-table6-paper", "002-table6", "paper", settings, (seed,), GENERATED, 5000, small)


def causal(seed: int) -> Study:
    settings = (*EAGER, "alphas=0,1,1.5,2", "activations=relu", "warmup=200")
    small = ("length=256", "tokens=256", "tested=2", "warmup=2")
    return Study("000-causal-evidence", "000-causal", "small", settings, (seed,), TEXT, 2000, small)


GRID = ("patch=4", "activations=relu", "alphas=0,0.5,1")
RATES = "000-fig2-rates-evidence"


def grid(*rates: float) -> Study:
    chosen = ",".join(f"{rate:g}" for rate in rates)
    return of_images(RATES, "000-fig2", (0,), 100, *GRID, f"rates={chosen}", "test_split=val")


def at_its_best(*seeds: int) -> Study:
    return of_images("000-fig2-evidence", "000-fig2", seeds, 100, *GRID, f"own_rates={CHOSEN}", "test_split=test")


def sizes(*seeds: int) -> Study:
    widths = ("points=w96/4,w192/4,w384/4", "test_split=test")
    return of_images("000-fig1-evidence", "000-fig1", seeds, 50, *widths)


def deep(*seeds: int) -> Study:
    shape = ("layers=6", "dim=512", "methods=reluformer,relu_unscaled,relu_regularised")
    return of_pairs("001-table5-deep-evidence", "001-table5", seeds, *shape)


EVIDENCE: dict[str, Study] = {
    **{f"listops-{seed}": listops(seed, *FAST) for seed in range(3)},
    **{f"listops-soft-{seed}": listops(seed, "soft") for seed in range(3)},
    "rates-0": grid(0.0005, 0.001),
    "rates-1": grid(0.002),
    "fig2-0": at_its_best(0, 1),
    "fig2-1": at_its_best(2, 3),
    "fig2-2": at_its_best(4),
    **{f"table4-{seed}": of_pairs("001-table4-evidence", "001-table4", (seed,)) for seed in range(3)},
    "table5": of_pairs("001-table5-evidence", "001-table5", (0, 1, 2)),
    **{f"causal-{seed}": causal(seed) for seed in range(3)},
    **{f"fig1-{seed}": sizes(seed) for seed in range(3)},
    **{f"deep-{seed}": deep(seed) for seed in range(3)},
}
"""Job -> what it trains, what decides most first."""
