//! A worker's state told as an image, and taken from one, piece by piece.
//!
//! Not told is what has its time by a clock of this process (what answers taught), what only waits to be known (parked
//! stores), and what may be out of date (a suspended worker).

use super::life::Mark;
use super::{Group, Worker};
use crate::counts::Counted;
use crate::image::{Flags, GroupImage, Head, ImageError, Other, Plain, Writer};
use crate::shared::{Shared, Walk};
use crate::store::{PlainNames, Restored};
use crate::table;

impl Mark {
    fn level(self) -> u8 {
        self as u8
    }

    fn of_level(level: u8) -> Self {
        [Self::Absent, Self::Settled, Self::Fresh].into_iter().find(|mark| mark.level() == level).unwrap_or_default()
    }
}

impl Worker {
    /// An image without blocks, and room for the names of those; `None` where it can't be told.
    pub(crate) fn tell(&self) -> Option<(Writer, PlainNames)> {
        if self.suspended || !self.parked.is_empty() || !self.runs.is_empty() || !self.names.is_empty() {
            return None;
        }
        if self.store.totals().guessed > 0 {
            return None;
        }
        let groups = self.groups.iter().map(|(number, group)| GroupImage {
            number: *number,
            kind: group.kind,
            window: group.window,
            block_size: group.block_size,
            sparse: group.sparse,
        });
        let flags = Flags {
            hides_keys: self.hides_keys,
            shows_unknown_keys: self.shows_unknown_keys,
            lost: self.lost,
            overfull: self.overfull,
            eagle: self.facts.eagle,
            marks: [self.marks.reannouncing, self.marks.hidden_keys].map(Mark::level),
        };
        let head = Head { flags, groups: groups.collect(), places: self.store.places() };
        Some((Writer::new(&self.model, &head, self.store.blocks())?, self.store.names()))
    }

    /// Tell names that plain blocks have and their entries don't, from there on, as far as there are steps. Where to go on,
    /// if those are not all.
    pub(crate) fn tell_names(&self, from: table::Place, steps: usize, names: &mut PlainNames) -> Option<table::Place> {
        self.store.tell_names(from, steps, names)
    }

    /// The same with plain blocks, of as many entries as there are steps; the names are sorted.
    pub(crate) fn tell_plain(
        &self,
        shared: &Shared,
        names: &mut PlainNames,
        from: Walk,
        steps: usize,
        writer: &mut Writer,
    ) -> Option<Walk> {
        self.store.tell_plain(shared, names, from, steps, writer)
    }

    /// The same with the blocks that are not plain, by the slots of their store; `None` where one can't be told.
    pub(crate) fn tell_others(&self, from: usize, steps: usize, writer: &mut Writer) -> Option<Option<usize>> {
        self.store.tell_others(from, steps, writer)
    }

    /// Begin to take an image: nothing is known of the worker yet. Suspended until it is taken.
    pub(crate) fn begin_restoring(&mut self, head: &Head) -> Result<Restored, ImageError> {
        let known = self.store.blocks() > 0 || !self.groups.is_empty() || self.lost;
        let learned = !self.parked.is_empty() || !self.runs.is_empty() || !self.names.is_empty();
        if known || learned || self.hides_keys || self.shows_unknown_keys {
            return Err(ImageError::new("something is known of the worker already: an image is for a new one"));
        }
        self.removals.lose();
        let flags = head.flags;
        self.hides_keys = flags.hides_keys;
        self.shows_unknown_keys = flags.shows_unknown_keys;
        self.lost = flags.lost;
        self.overfull = flags.overfull;
        self.facts.eagle |= flags.eagle;
        let [reannouncing, hidden_keys] = flags.marks.map(Mark::of_level);
        self.marks.reannouncing = self.marks.reannouncing.max(reannouncing);
        self.marks.hidden_keys = self.marks.hidden_keys.max(hidden_keys);
        for group in &head.groups {
            let GroupImage { number, kind, window, block_size, sparse } = *group;
            self.groups.insert(number, Group { kind, window, block_size, sparse });
        }
        let restored = self.store.begin_restoring(&head.places, self.suspended);
        self.suspended = true;
        Ok(restored)
    }

    pub(crate) fn restore_plain(&mut self, shared: &mut Shared, restored: &mut Restored, block: Plain) {
        self.store.restore_plain(shared, restored, block);
    }

    pub(crate) fn restore_other(&mut self, shared: &mut Shared, restored: &Restored, block: &Other<'_>) {
        self.store.restore_other(shared, restored, block);
    }

    /// All blocks are there.
    pub(crate) fn end_restoring(&mut self, restored: &Restored) {
        self.suspended = restored.suspended;
        let gpu_copies = self.store.totals().gpu_copies;
        self.overfull |= self.facts.usable_blocks.is_some_and(|usable| gpu_copies > usable);
        self.counts.add_many(Counted::Restored, self.store.blocks() as u64);
    }

    /// Another figure means that all that was known went meanwhile.
    pub(crate) fn losses(&self) -> u64 {
        self.removals.lost_at()
    }

    /// How often it changed, however it did.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    pub(crate) fn note_change(&mut self) {
        self.changes += 1;
    }
}
