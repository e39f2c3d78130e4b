//! The blocks of a store told to an image, and taken from one.

use super::own::{Place, Spot};
use super::{Kind, Store};
use crate::event::{EngineHash, Tier};
use crate::image::{Other, Plain, Writer};
use crate::shared::{Shared, Slot, Walk};
use crate::steps::Steps;
use crate::table;

/// The names of plain blocks that their entries don't have; to be asked for in the order of their slots.
#[derive(Debug)]
pub(crate) struct PlainNames {
    /// In that order, once they are sorted.
    names: Vec<(Slot, u64)>,
    /// Those before it were asked for.
    at: usize,
}

impl PlainNames {
    /// All are there.
    pub(crate) fn sort(&mut self) {
        self.names.sort_unstable_by_key(|(slot, _)| slot.0);
    }

    fn of(&mut self, slot: Slot) -> Option<u64> {
        while self.names.get(self.at).is_some_and(|(other, _)| other.0 < slot.0) {
            self.at += 1;
        }
        self.names.get(self.at).filter(|(other, _)| *other == slot).map(|(_, name)| *name)
    }
}

/// An image on its way into a store.
#[derive(Debug)]
pub(crate) struct Restored {
    /// By their numbers in the image.
    places: Vec<Place>,
    /// The last plain block's entry and depth.
    last: Option<(Slot, u32)>,
    /// Was the worker suspended before?
    pub suspended: bool,
}

impl Store {
    /// By number, home first.
    pub(crate) fn places(&self) -> Vec<(Tier, i64)> {
        self.own.places()
    }

    /// Room for what [`Store::tell_names`] tells.
    pub(crate) fn names(&self) -> PlainNames {
        PlainNames { names: Vec::with_capacity(self.aliases.len()), at: 0 }
    }

    // See `Worker::tell_names` and those beside it for what these do.

    pub(crate) fn tell_names(&self, from: table::Place, steps: usize, names: &mut PlainNames) -> Option<table::Place> {
        let steps = &mut Steps::new(steps);
        self.aliases.look_through(from, steps, |alias| names.names.push((alias.slot, alias.name())))
    }

    pub(crate) fn tell_plain(
        &self,
        shared: &Shared,
        names: &mut PlainNames,
        from: Walk,
        steps: usize,
        writer: &mut Writer,
    ) -> Option<Walk> {
        let member = self.member?;
        let mut last = None;
        shared.look_through(from, steps, |slot, holders| {
            let kind = match last {
                Some((same, kind)) if same == holders => kind,
                _ => shared.kind(holders, member),
            };
            last = Some((holders, kind));
            let name = match kind {
                Some(Kind::Named) => shared.name(slot),
                Some(Kind::Alias) => names.of(slot),
                Some(Kind::Odd) | None => None,
            };
            if let Some(name) = name {
                writer.plain(Plain { key: shared.key(slot), name, depth: shared.depth(slot) });
            }
        })
    }

    pub(crate) fn tell_others(&self, from: usize, steps: usize, writer: &mut Writer) -> Option<Option<usize>> {
        let rest = self.own.tell(from, &mut Steps::new(steps), |block| writer.other(&block))?;
        Some((rest < self.own.slots()).then_some(rest))
    }

    pub(crate) fn begin_restoring(&mut self, places: &[(Tier, i64)], suspended: bool) -> Restored {
        let places = places.iter().map(|(tier, group)| self.own.place_or_new(*tier, *group)).collect();
        Restored { places, last: None, suspended }
    }

    pub(crate) fn restore_plain(&mut self, shared: &mut Shared, restored: &mut Restored, block: Plain) {
        let Plain { key, name, depth } = block;
        let before = restored.last.filter(|(_, last)| last + 1 == depth).map(|(slot, _)| slot);
        let spot = Spot { key, depth, guessed: false };
        let placed = self.add_at(shared, restored.places[0], &EngineHash::Unsigned(name), || Some(spot), before);
        restored.last = placed.and_then(|(_, slot)| Some((slot?, depth)));
    }

    pub(crate) fn restore_other(&mut self, shared: &mut Shared, restored: &Restored, block: &Other<'_>) {
        for (place, count, doubt) in &block.copies {
            self.own.put(restored.places[usize::from(*place)], &block.name, *count, *doubt);
        }
        let Some((key, depth)) = block.spot else {
            return;
        };
        let spot = Spot { key, depth, guessed: false };
        if !block.shares_key {
            self.set_spot(shared, &block.name, spot);
        } else if let Some(slot) = self.own.find(&block.name) {
            self.own.hide(slot, spot);
            self.sync(shared);
        }
    }
}
