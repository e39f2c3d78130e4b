//! SplitMix64: numbers that look random and are the same every time.

/// Tokens are below this, as in the vocabularies of today's models.
const VOCABULARY: u64 = 152_000;

/// See the module.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Equal seeds, equal numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// So many numbers.
    pub fn numbers(&mut self, count: usize) -> Vec<u64> {
        (0..count).map(|_| self.number()).collect()
    }

    /// So many tokens.
    pub fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| u32::try_from(self.number() % VOCABULARY).expect("a small number")).collect()
    }
}
