"""Seeds: the 64-bit mixing function for all random numbers, and the seeds of the samples of one request.

The finaliser and its increment are those of SplitMix64 (Steele, Lea, Flood 2014). `workers.sampling.noise` computes the
same function over tensors.
"""

INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = (1 << 64) - 1


def mix(word: int) -> int:
    """Scramble a uint64: a bijection in which every input bit reaches every output bit."""
    word = ((word ^ (word >> SHIFTS[0])) * MULTIPLIERS[0]) & MASK
    word = ((word ^ (word >> SHIFTS[1])) * MULTIPLIERS[1]) & MASK
    return word ^ (word >> SHIFTS[2])


def mix_seed(seed: int, sample: int) -> int:
    """Return the uint64 seed of sample number *sample* of a request whose seed is *seed* (taken modulo 2^64).

    Sample 0 keeps the seed itself, so that `n` does not change the first answer.
    """
    seed &= MASK
    return seed if sample == 0 else mix((mix(seed) + sample * INCREMENT) & MASK)
