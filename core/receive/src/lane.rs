//! The one case in which there is nothing to decide about a batch, and what is to be told afterwards.
//!
//! A lane is given the number that a live stream expects next and the time of its last batch. It takes a message that has
//! three frames, that number, and a time which is neither before the last one nor so much later that the process may have
//! been replaced: exactly what the stream itself would apply and think no more about (`Stream.live` in
//! `kvsync/events/stream.py`, which stays the truth). What it took, the stream is told in one go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// How far a lane has come, for any thread at any time.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Batches that were taken since the lane was made. The index has them all.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Lane {
    /// Who the batches are for.
    pub worker: Arc<Registered>,
    next: u64,
    at: f64,
    pause: f64,
    progress: Progress,
    told: u64,
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
        Self { worker, next, at, pause, progress: Progress::default(), told: 0, times: Box::new([0.0; REMEMBERED]) }
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

    /// How far it has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// It was taken: the index has it.
    pub fn took(&mut self, head: Head) {
        self.next = head.number + 1;
        self.at = head.time;
        self.progress.0.fetch_add(1, Ordering::Release);
        self.times[head.number as usize % REMEMBERED] = head.time;
    }

    /// What was taken since this was asked last.
    pub fn tally(&mut self) -> Option<Tally> {
        let count = self.progress.count() - self.told;
        self.told += count;
        let told = count.min(REMEMBERED as u64);
        let times = (self.next - told..self.next)
            .flat_map(|number| self.times[number as usize % REMEMBERED].to_be_bytes())
            .collect();
        (count > 0).then(|| Tally { count, last: self.next - 1, times })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvsync_index::{Facts, Index};

    fn lane(next: u64, at: f64) -> Lane {
        let index = Index::new();
        index.add_worker("w", "m", Facts::default());
        Lane::new(index.worker("w").unwrap(), next, at, 5.0)
    }

    fn payload(time: f64) -> Vec<u8> {
        [&[0x92, 0xcb][..], &time.to_be_bytes(), &[0x90]].concat()
    }

    fn accepts(lane: &Lane, number: i64, payload: &[u8]) -> Option<Head> {
        lane.accepts(None, &number.to_be_bytes(), payload)
    }

    #[test]
    fn only_the_next_number_is_taken() {
        let lane = lane(7, 100.0);
        for number in [i64::MIN, -7, -1, 0, 6, 8, i64::MAX] {
            assert!(accepts(&lane, number, &payload(100.0)).is_none(), "{number}");
        }
        assert!(accepts(&lane, 7, &payload(100.0)).is_some());
        for sequence in [&[][..], &[0; 7], &[0, 0, 0, 0, 0, 0, 0, 7, 0]] {
            assert!(lane.accepts(None, sequence, &payload(100.0)).is_none(), "{sequence:?}");
        }
    }

    #[test]
    fn numbers_end_where_they_become_negative() {
        let last = accepts(&lane(i64::MAX as u64, 0.0), i64::MAX, &payload(0.0)).unwrap();
        let mut behind = lane(i64::MAX as u64, 0.0);
        behind.took(last);
        assert!(accepts(&behind, i64::MIN, &payload(0.0)).is_none());
    }

    #[test]
    fn a_time_that_goes_back_or_far_ahead_or_is_none_is_not_taken() {
        let lane = lane(0, 100.0);
        for time in [100.0, 100.001, 104.999] {
            assert!(accepts(&lane, 0, &payload(time)).is_some(), "{time}");
        }
        for time in [99.999, 105.0, 1e9, -100.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(accepts(&lane, 0, &payload(time)).is_none(), "{time}");
        }
        for length in 0..10 {
            assert!(accepts(&lane, 0, &payload(100.0)[..length]).is_none(), "cut to {length}");
        }
        let single = [&[0x92, 0xca][..], &100.0f32.to_be_bytes(), &[0; 6]].concat();
        assert!(accepts(&lane, 0, &single).is_none(), "a float32");
        assert!(accepts(&Lane::new(Arc::clone(&lane.worker), 0, f64::NAN, 5.0), 0, &payload(1.0)).is_none());
    }

    #[test]
    fn what_is_about_to_be_taken_counts() {
        let lane = lane(0, 100.0);
        let first = accepts(&lane, 0, &payload(103.0)).unwrap();
        assert!(lane.accepts(Some(first), &1i64.to_be_bytes(), &payload(102.0)).is_none());
        assert!(lane.accepts(Some(first), &1i64.to_be_bytes(), &payload(107.0)).is_some());
    }

    #[test]
    fn the_last_times_are_told_as_they_stood_there() {
        let mut lane = lane(10, -0.0);
        assert_eq!(lane.tally(), None);
        for (number, time) in [(10, -0.0), (11, 0.5)] {
            lane.took(accepts(&lane, number, &payload(time)).unwrap());
        }
        let times = [(-0.0f64).to_be_bytes(), 0.5f64.to_be_bytes()].concat();
        assert_eq!(lane.tally(), Some(Tally { count: 2, last: 11, times }));
        assert_eq!(lane.tally(), None);
        for number in 12..1012 {
            lane.took(accepts(&lane, number, &payload(number as f64 / 10.0)).unwrap());
        }
        let tally = lane.tally().unwrap();
        assert_eq!((tally.count, tally.last, tally.times.len()), (1000, 1011, 8 * REMEMBERED));
        assert_eq!(tally.times[..8], (756.0f64 / 10.0).to_be_bytes());
        assert_eq!(tally.times[8 * REMEMBERED - 8..], (1011.0f64 / 10.0).to_be_bytes());
    }
}
