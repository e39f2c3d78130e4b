//! Work that is done under a lock, cut into pieces that nobody minds waiting for.

/// How much may still be done in this piece, in *steps* of some nanoseconds each.
#[derive(Debug)]
pub(crate) struct Steps(usize);

impl Steps {
    /// What it takes to look at a block that may stand anywhere in memory, and to drop one.
    pub(crate) const LOOKED_AT: usize = 8;
    pub(crate) const DROPPED: usize = 32;

    pub(crate) fn new(steps: usize) -> Self {
        Self(steps)
    }

    pub(crate) fn are_left(&self) -> bool {
        self.0 > 0
    }

    /// What was begun is done to its end, whatever it takes.
    pub(crate) fn take(&mut self, steps: usize) {
        self.0 = self.0.saturating_sub(steps);
    }
}
