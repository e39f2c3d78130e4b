//! Blocks of a worker's own, told to an image and taken from one.

use super::{Copies, Own, Place, Placement, Slot, Spot};
use crate::event::{EngineHash, Tier};
use crate::image::Other;
use crate::steps::Steps;

impl Own {
    /// By number.
    pub(crate) fn places(&self) -> Vec<(Tier, i64)> {
        let mut places: Vec<_> = self.places.iter().map(|(at, place)| (place.0, *at)).collect();
        places.sort_unstable_by_key(|(number, _)| *number);
        places.into_iter().map(|(_, at)| at).collect()
    }

    /// Tell the blocks from a slot on, as many as there are steps for, without guesses about them. Returns where the
    /// others begin; `None` where one has more copies than an image can say.
    pub(crate) fn tell(
        &self,
        from: usize,
        steps: &mut Steps,
        mut each: impl FnMut(Other<'_>) -> Option<()>,
    ) -> Option<usize> {
        let mut at = from;
        while steps.are_left()
            && let Some(block) = self.blocks.get(at)
        {
            steps.take(1);
            if block.places > 0 {
                steps.take(Steps::LOOKED_AT * (1 + self.tiers.len()));
                each(self.image_of(Slot(at as u32))?)?;
            }
            at += 1;
        }
        Some(at)
    }

    fn image_of(&self, slot: Slot) -> Option<Other<'_>> {
        let block = &self.blocks[slot];
        let mut copies = Vec::with_capacity(block.places.into());
        for place in 0..self.tiers.len() {
            let here = self.copies(Place(place), slot);
            if here.count() > 0 {
                copies.push((u16::try_from(place).ok()?, u32::try_from(here.count()).ok()?, here.doubtful()));
            }
        }
        let shares_key = block.placement == Placement::Hidden;
        Some(Other { name: block.name.borrowed(), spot: block.spot(), shares_key, copies })
    }

    /// So many copies in a place where there are none.
    pub(crate) fn put(&mut self, place: Place, name: &EngineHash<'_>, count: u32, doubt: bool) {
        let slot = self.slot_of(name);
        let doubt = if doubt { Copies::DOUBT } else { 0 };
        self.set_copies(place, slot, Copies(u64::from(count) | doubt));
    }

    /// Give a block without a key one that other hashes have had as well.
    pub(crate) fn hide(&mut self, slot: Slot, spot: Spot) {
        let Spot { key, depth, .. } = spot;
        *self.hidden.entry(key).or_default() += 1;
        let block = &mut self.blocks[slot];
        (block.key, block.depth, block.placement) = (key, depth, Placement::Hidden);
        self.touched.push((key, depth));
        self.totals.placed += 1;
    }
}
