//! The one case in which there is nothing to decide about a batch, and what is to be told afterwards.
//!
//! A lane is given the number that a live stream expects next and the time of its last batch. It takes a message that has
//! three frames, that number, and a time which is neither before the last one nor so much later that the process may have
//! been replaced: exactly what the stream itself would apply and think no more about (`Stream.live` in
//! `kvsync/events/stream.py`, which stays the truth). What it took, the stream is told in one go.

use std::sync::Arc;

use kvsync_index::Registered;

/// Times that are told, at most: as many as a stream remembers.
pub const REMEMBERED: usize = 256;

/// The time of a batch: an array's first item, where that is a float64. Without one NaN, for which no comparison holds.
fn time(payload: &[u8]) -> f64 {
    match payload {
        [_, 0xcb, time @ ..] => time.first_chunk::<8>().map_or(f64::NAN, |bytes| f64::from_be_bytes(*bytes)),
        _ => f64::NAN,
    }
}

/// What a stream is told of the batches that were taken since it was told last.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// The number of the last one.
    pub last: u64,
    /// The times of the last ones, oldest first, as they stood in the batches: 8 bytes each.
    pub times: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub struct Lane {
    /// Who the batches are for.
    pub worker: Arc<Registered>,
    next: u64,
    at: f64,
    pause: f64,
    count: u64,
    /// A ring: the time of number n is at n modulo its length.
    times: Box<[f64; REMEMBERED]>,
}

/// What is to be known of a batch to take it.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    number: u64,
    time: f64,
}

impl Lane {
    /// `next`: the number that the stream expects; `at`: the time of its last batch; `pause`: a batch so many seconds
    /// later, or more, is not taken.
    #[must_use]
    pub fn new(worker: Arc<Registered>, next: u64, at: f64, pause: f64) -> Self {
        Self { worker, next, at, pause, count: 0, times: Box::new([0.0; REMEMBERED]) }
    }

    /// Whether a message may be taken as the next one: behind the last that was taken, or behind `before`, which is about
    /// to be.
    #[must_use]
    pub fn accepts(&self, before: Option<Head>, sequence: &[u8], payload: &[u8]) -> Option<Head> {
        let (next, at) = before.map_or((self.next, self.at), |before| (before.number + 1, before.time));
        let number = u64::try_from(i64::from_be_bytes(sequence.try_into().ok()?)).ok()?;
        let time = time(payload);
        (number == next && (0.0..self.pause).contains(&(time - at))).then_some(Head { number, time })
    }

    /// It was taken.
    pub fn took(&mut self, head: Head) {
        self.next = head.number + 1;
        self.at = head.time;
        self.count += 1;
        self.times[head.number as usize % REMEMBERED] = head.time;
    }

    /// What was taken since this was asked last.
    pub fn tally(&mut self) -> Option<Tally> {
        let count = std::mem::take(&mut self.count);
        let told = count.min(REMEMBERED as u64);
        let times = (self.next - told..self.next)
            .flat_map(|number| self.times[number as usize % REMEMBERED].to_be_bytes())
            .collect();
        (count > 0).then(|| Tally { count, last: self.next - 1, times })
    }
}
