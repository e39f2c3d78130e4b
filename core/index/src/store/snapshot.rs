//! The blocks of a store told to an image, and taken from one.

use hashbrown::HashMap;

use super::own::{Place, Spot};
use super::{Kind, Store};
use crate::event::{EngineHash, Tier};
use crate::image::{Other, Plain, Writer};
use crate::shared::{Shared, Slot, Walk};

/// The names of plain blocks that their entries don't have.
#[derive(Debug)]
pub(crate) struct PlainNames(HashMap<Slot, u64>);

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

    pub(crate) fn names(&self) -> PlainNames {
        PlainNames(self.aliases.iter().map(|alias| (alias.slot, alias.name())).collect())
    }

    /// See [`Worker::tell_plain`](crate::Worker).
    pub(crate) fn tell_plain(
        &self,
        shared: &Shared,
        names: &PlainNames,
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
                Some(Kind::Alias) => names.0.get(&slot).copied(),
                Some(Kind::Odd) | None => None,
            };
            if let Some(name) = name {
                writer.plain(Plain { key: shared.key(slot), name, depth: shared.depth(slot) });
            }
        })
    }

    pub(crate) fn tell_others(&self, writer: &mut Writer) -> Option<()> {
        self.own.used().try_for_each(|slot| writer.other(&self.own.tell(slot)?))
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
