from accelerate.losses.lm import (
    Reduction as Reduction,
    Sequences as Sequences,
    lm_loss as lm_loss,
    ranks_of_sequences as ranks_of_sequences,
)
from accelerate.losses.models import use_lm_loss as use_lm_loss
