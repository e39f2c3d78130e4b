//! What happened to a worker, by word: for metrics, never for decisions.

use crate::event::SkipReason;
use crate::wire::BatchError;

macro_rules! counted {
    ($($(#[$meta:meta])* $name:ident = $word:literal,)*) => {
        /// Something that is counted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Counted {
            $($(#[$meta])* $name,)*
        }

        const WORDS: &[&str] = &[$($word),*];
    };
}

counted! {
    /// Batches applied.
    Batches = "batches",
    /// Batches of another rank, dropped.
    WrongRank = "wrong_rank",
    /// Store events.
    Stored = "stored",
    /// Removal events.
    Removed = "removed",
    /// Clear events.
    Cleared = "cleared",
    /// Losses beyond repair.
    Forgotten = "forgotten",
    /// New epochs.
    Epochs = "epochs",
    /// Times that all was to be learned again from the same process.
    Relearned = "relearned",
    /// Blocks taken from an image.
    Restored = "restored",
    /// Events of a medium that this version doesn't know.
    UnknownMedium = "unknown_medium",
    /// Removals of a block that was not known to be there.
    RemovedUnknown = "removed_unknown",
    /// Doubtful blocks dropped because they were more than the engine can hold.
    DoubtfulDropped = "doubtful_dropped",
    /// Doubtful blocks dropped because an answer showed that they are not there.
    DoubtfulMissed = "doubtful_missed",
    /// Blocks dropped because all workers together held too many.
    Capped = "capped",
    /// Stores that can't be placed: sparse, or of another block size than their group's.
    Unplaced = "unplaced",
    /// Offload stores of unknown hashes that don't show their extra keys.
    WaitingOffload = "waiting_offload",
    /// Stores that wait for their parent.
    Parked = "parked",
    /// Of those, the ones that made room.
    ParkedDropped = "parked_dropped",
    /// Runs of blocks that answers showed.
    ObservedRuns = "observed_runs",
    /// Of those, the ones that made room.
    ObservedDropped = "observed_dropped",
    /// Answers that showed more than the events, of workers where that can't be kept.
    ObservedUnusable = "observed_unusable",
    /// Unknown parents that are taken for the last blocks of observed runs.
    Adopted = "adopted",
    /// Payloads too large to be read.
    TooLarge = "undecodable_too_large",
    /// Payloads that are no msgpack.
    NotMsgpack = "undecodable_not_msgpack",
    /// Payloads that are neither array nor map.
    NotABatch = "undecodable_not_a_batch",
    /// Batches without a timestamp or events.
    BatchMissingField = "undecodable_missing_field",
    /// Batches with a field of the wrong type.
    BatchWrongType = "undecodable_wrong_type",
    /// Events of an unknown kind.
    UnknownTag = "skipped_unknown_tag",
    /// Events without a readable kind.
    NoTag = "skipped_no_tag",
    /// What stood in an event's place.
    NotAnEvent = "skipped_not_an_event",
    /// Events without hashes.
    MissingField = "skipped_missing_field",
    /// Events with a field of the wrong type.
    WrongType = "skipped_wrong_type",
    /// Events with a hash that is none.
    BadHash = "skipped_bad_hash",
    /// Events with a token that is none.
    BadToken = "skipped_bad_token",
    /// Events with a block size that can't be.
    BadBlockSize = "skipped_bad_block_size",
    /// Events with a group that can't be.
    BadGroup = "skipped_bad_group",
}

impl From<SkipReason> for Counted {
    fn from(reason: SkipReason) -> Self {
        match reason {
            SkipReason::UnknownTag => Self::UnknownTag,
            SkipReason::NoTag => Self::NoTag,
            SkipReason::NotAnEvent => Self::NotAnEvent,
            SkipReason::MissingField => Self::MissingField,
            SkipReason::WrongType => Self::WrongType,
            SkipReason::BadHash => Self::BadHash,
            SkipReason::BadToken => Self::BadToken,
            SkipReason::BadBlockSize => Self::BadBlockSize,
            SkipReason::BadGroup => Self::BadGroup,
        }
    }
}

impl From<BatchError> for Counted {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::TooLarge => Self::TooLarge,
            BatchError::NotMsgpack => Self::NotMsgpack,
            BatchError::NotABatch => Self::NotABatch,
            BatchError::MissingField => Self::BatchMissingField,
            BatchError::WrongType => Self::BatchWrongType,
        }
    }
}

/// A number for each [`Counted`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts([u64; WORDS.len()]);

impl Counts {
    pub(crate) fn new() -> Self {
        Self([0; WORDS.len()])
    }

    pub(crate) fn add(&mut self, counted: impl Into<Counted>) {
        self.add_many(counted, 1);
    }

    pub(crate) fn add_many(&mut self, counted: impl Into<Counted>, times: u64) {
        self.0[counted.into() as usize] += times;
    }

    /// How often.
    #[must_use]
    pub fn get(&self, counted: Counted) -> u64 {
        self.0[counted as usize]
    }

    /// All that happened at least once, by word.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        WORDS.iter().copied().zip(self.0).filter(|(_, count)| *count > 0)
    }
}
