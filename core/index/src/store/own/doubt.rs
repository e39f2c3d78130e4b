//! Copies in doubt (they may have left without a word, or never have been there), and blocks whose keys are guessed.

use super::{Copies, Own, Place, Placement};
use crate::key::BlockKey;

impl Own {
    /// Copies in doubt, one for each block and place.
    pub(crate) fn doubtful(&self) -> u64 {
        self.doubtful.len() as u64
    }

    /// Drop every doubtful block from its place; returns how many that were.
    pub(crate) fn drop_doubtful(&mut self) -> u64 {
        let dropped = std::mem::take(&mut self.doubtful);
        for &(place, slot) in &dropped {
            self.set_copies(place, slot, Copies::default());
            self.free_if_gone(slot);
        }
        dropped.len() as u64
    }

    /// The block of this key is in this place, if it is in no other tier (there it may be instead): no doubt any more.
    pub(crate) fn confirm(&mut self, place: Place, key: BlockKey) {
        let Some(slot) = self.find_key(key).filter(|slot| self.copies(place, *slot).doubtful()) else {
            return;
        };
        let tier = self.tiers[place.0];
        let elsewhere = |other: Place| self.tiers[other.0] != tier && self.copies(other, slot).count() > 0;
        if !(0..self.tiers.len()).map(Place).any(elsewhere) {
            self.set_copies(place, slot, Copies(self.copies(place, slot).count()));
        }
    }

    /// Is there anything that is expected only?
    pub(crate) fn expects(&self) -> bool {
        !self.doubtful.is_empty() || self.totals.guessed > 0
    }

    /// The block of this key is nowhere: its doubtful copies go, or all if it is guessed. Returns how many that were.
    pub(crate) fn drop_expected(&mut self, key: BlockKey) -> u64 {
        let Some(slot) = self.find_key(key) else {
            return 0;
        };
        let guessed = self.blocks[slot].placement == Placement::Guessed;
        let mut dropped = 0;
        for place in (0..self.tiers.len()).map(Place) {
            let copies = self.copies(place, slot);
            if copies.doubtful() || (guessed && copies.count() > 0) {
                self.set_copies(place, slot, Copies::default());
                dropped += 1;
            }
        }
        self.free_if_gone(slot);
        dropped
    }

    /// The slots of doubtful copies are those of live blocks only.
    #[cfg(test)]
    pub(super) fn check_doubtful(&self) {
        for &(place, slot) in &self.doubtful {
            assert!(self.copies(place, slot).doubtful());
        }
        let marked = (0..self.blocks.len()).flat_map(|at| {
            let slot = super::Slot(at as u32);
            (0..self.tiers.len()).map(Place).filter(move |place| self.copies(*place, slot).doubtful())
        });
        assert_eq!(marked.count(), self.doubtful.len());
    }
}
