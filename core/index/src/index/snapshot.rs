//! Workers told as images, and taken from them, without keeping lookups waiting: a piece at a time.
//!
//! A worker is told as it stood at one moment: if anything changes it between two pieces, all is told again. One that is
//! being taken is suspended meanwhile, so no lookup takes a part of it for the whole.

use std::sync::atomic::Ordering;

use parking_lot::RwLockWriteGuard;

use super::{Body, Index, Registered, STEPS, STEPS_PER_BATCH};
use crate::image::{Image, ImageError, Plain};
use crate::shared::{Shared, Walk};
use crate::steps::Steps;
use crate::table;
use crate::worker::Worker;

/// Blocks that are taken under one lock.
const BLOCKS: usize = 512;
/// How often a worker is told again that changes meanwhile.
const TRIES: usize = 4;

/// What came of telling a worker.
enum Told {
    Wholly(Option<Vec<u8>>),
    /// It changed meanwhile.
    Partly,
}

impl Index {
    /// What is known of a worker, as an image; `None` where that can't be told now.
    ///
    /// Any thread may ask. To be called where no batches come for the worker meanwhile: one that changes all the time is
    /// not told.
    #[must_use]
    pub fn dump(&self, name: &str) -> Option<Vec<u8>> {
        let registered = self.worker(name)?;
        for _ in 0..TRIES {
            if let Told::Wholly(image) = tell(&registered) {
                return image;
            }
        }
        None
    }

    /// Have a new worker know what an image tells. What is wrong with it is said before anything is changed; of a worker
    /// that is not registered nothing is changed.
    pub fn restore(&self, name: &str, image: &[u8]) -> Result<(), ImageError> {
        let image = Image::decode(image)?;
        let Some(registered) = self.worker(name) else {
            return Ok(());
        };
        if registered.model.name != image.model {
            let (theirs, ours) = (image.model, &registered.model.name);
            return Err(ImageError::new(format!("an image of model {theirs:?}, for a worker of {ours:?}")));
        }
        let mut begun = Ok(None);
        self.take_piece(&registered, |worker, _| {
            begun = worker.begin_restoring(&image.head).map(|restored| Some((restored, worker.losses())));
        });
        let Some((mut restored, losses)) = begun? else {
            return Ok(()); // removed meanwhile
        };
        let plain: Vec<Plain> = image.plain().collect();
        let mut goes_on = true;
        // Whoever has it forgotten in between ends this, too.
        let mut piece = |take: &mut dyn FnMut(&mut Worker, &mut Shared)| {
            goes_on = goes_on && {
                let mut same = false;
                self.take_piece(&registered, |worker, shared| {
                    same = worker.losses() == losses;
                    if same {
                        take(worker, shared);
                    }
                }) && same
            };
        };
        for blocks in plain.chunks(BLOCKS) {
            piece(&mut |worker, shared| {
                blocks.iter().for_each(|block| worker.restore_plain(shared, &mut restored, *block));
            });
        }
        for blocks in image.others.chunks(BLOCKS) {
            piece(&mut |worker, shared| {
                blocks.iter().for_each(|block| worker.restore_other(shared, &restored, block));
            });
        }
        self.take_piece(&registered, |worker, _| worker.end_restoring(&restored));
        self.keep_bounds(image.blocks());
        Ok(())
    }

    /// As [`Index::change`], but that no room is made: that is for the whole image to ask for.
    fn take_piece(&self, registered: &Registered, take: impl FnOnce(&mut Worker, &mut Shared)) -> bool {
        let mut guard = registered.model.body.write();
        let Body { workers, shared } = &mut *guard;
        let Some(worker) = workers.get_mut(&registered.registration) else {
            return false;
        };
        let before = worker.blocks();
        take(worker, shared);
        worker.note_change();
        registered.model.recount(worker);
        let after = worker.blocks();
        shared.sweep(Steps::new(STEPS_PER_BATCH + 4 * after.saturating_sub(before) as usize));
        self.blocks.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
        RwLockWriteGuard::unlock_fair(guard);
        true
    }
}

/// A worker, as long as it stays as it is.
struct Unchanged<'r> {
    registered: &'r Registered,
    changes: u64,
}

impl Unchanged<'_> {
    /// Go through it from `first` on, in pieces under the lock; each says where the next one begins. False: it changed.
    fn go_through<P>(&self, first: P, mut piece: impl FnMut(&Worker, &Shared, P) -> Option<P>) -> bool {
        let mut next = Some(first);
        while let Some(from) = next {
            let body = self.registered.model.body.read();
            match self.registered.worker(&body) {
                Some(worker) if worker.changes() == self.changes => next = piece(worker, &body.shared, from),
                _ => return false,
            }
        }
        true
    }
}

fn tell(registered: &Registered) -> Told {
    let begun = {
        let body = registered.model.body.read();
        registered.worker(&body).and_then(|worker| Some((worker.tell()?, worker.changes())))
    };
    let Some(((mut writer, mut names), changes)) = begun else {
        return Told::Wholly(None);
    };
    let unchanged = Unchanged { registered, changes };
    let start = table::Place::default();
    if !unchanged.go_through(start, |worker, _, from| worker.tell_names(from, STEPS, &mut names)) {
        return Told::Partly;
    }
    names.sort();
    let plain =
        |worker: &Worker, shared: &Shared, from| worker.tell_plain(shared, &mut names, from, STEPS, &mut writer);
    if !unchanged.go_through(Walk::START, plain) {
        return Told::Partly;
    }
    let mut tellable = true;
    let others = |worker: &Worker, _: &Shared, from| {
        let rest = worker.tell_others(from, STEPS, &mut writer);
        tellable = rest.is_some();
        rest.flatten()
    };
    if !unchanged.go_through(0, others) {
        return Told::Partly;
    }
    Told::Wholly(tellable.then(|| writer.done()))
}
