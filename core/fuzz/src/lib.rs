//! What must hold whatever an engine sends, and whatever happens to its worker: functions that panic where it does not.
//!
//! libFuzzer drives them from `fuzz_targets/`; `cargo test` tries some thousand damaged seeds (`index/tests/damage.rs`).

use std::collections::{BTreeSet, HashMap};

use kvsync_index::event::{Adapter, EngineHash, Event, ExtraKey, Run};
use kvsync_index::wire::{Batch, BatchError, MAX_EVENTS, MAX_GROUPS, MAX_HASHES};
use kvsync_index::{Answer, Bounds, Facts, Index, Match, Observation, Prompt, Shared, Trust, Worker};
use xxhash_rust::xxh3::xxh3_64;

/// Decode a payload: what comes out is within the bounds that everything behind relies on, and the same each time.
///
/// Returns what came out, by word.
pub fn decode(payload: &[u8]) -> BTreeSet<&'static str> {
    let batch = match Batch::decode(payload) {
        Ok(batch) => batch,
        Err(error) => return BTreeSet::from([word(error)]),
    };
    let mut came = BTreeSet::new();
    let again = batch.clone();
    let (mut events, mut hashes) = (0, 0);
    for (event, same) in batch.zip(again) {
        assert_eq!(event, same);
        events += 1;
        hashes += event.hashes().len();
        came.insert(match event {
            Event::Stored(stored) => {
                assert!((0..MAX_GROUPS).contains(&stored.group));
                let blocks = stored.run.hashes.len();
                assert!(stored.run.extra_keys.is_none_or(|keys| keys.is_empty() || keys.len() == blocks));
                "stored"
            }
            Event::Removed(removed) => {
                assert!(removed.group.is_none_or(|group| (0..MAX_GROUPS).contains(&group)));
                assert!(removed.remaining.is_none_or(|counts| counts.len() == removed.hashes.len()));
                "removed"
            }
            Event::Cleared => "cleared",
            Event::Skipped { .. } => "skipped",
        });
    }
    assert!(events <= MAX_EVENTS && hashes <= MAX_HASHES);
    came
}

/// Take an image that has these bytes before its digest: wholly or not at all, and what was taken can be told again, is
/// the same wherever it is taken, and can be forgotten.
///
/// Returns what came of it, by word.
pub fn image(body: &[u8]) -> BTreeSet<&'static str> {
    let sealed = [body, &xxh3_64(body).to_le_bytes()].concat();
    let taken = |image: &[u8]| {
        let index = Index::new();
        index.add_worker("w", MODEL, Facts::default());
        let taken = index.restore("w", image);
        (index, taken)
    };
    let ((new, _), (index, came)) = (taken(&[]), taken(&sealed));
    if came.is_err() {
        assert_eq!(index.describe(), new.describe());
        return BTreeSet::from(["refused"]);
    }
    let again = index.dump("w").expect("what was taken can be told");
    assert!(again.len() <= sealed.len(), "a block that need not be told at length is not");
    let (other, came) = taken(&again);
    came.expect("what was told can be taken");
    assert_eq!(index.describe(), other.describe());
    let state = index.describe().remove(0).1;
    assert!(state.placed <= state.blocks && state.blocks <= state.copies && state.doubtful <= state.copies);
    index.change_named("w", Worker::forget);
    index.expire(0.0);
    assert_eq!(index.describe().remove(0).1.blocks, 0);
    let words = [("taken", true), ("placed", state.placed > 0), ("copies", state.copies > state.blocks)];
    words.into_iter().filter_map(|(word, is_so)| is_so.then_some(word)).collect()
}

fn word(error: BatchError) -> &'static str {
    match error {
        BatchError::TooLarge => "too large",
        BatchError::NotMsgpack => "not msgpack",
        BatchError::NotABatch => "no batch",
        BatchError::MissingField => "a field is missing",
        BatchError::WrongType => "wrong type",
    }
}

/// The steps of a script, each one byte and its arguments; see `seeds.py`, which writes some.
mod step {
    pub const APPLY: u8 = 0;
    pub const ASK: u8 = 1;
    pub const FORGET: u8 = 2;
    pub const NEW_EPOCH: u8 = 3;
    pub const RELEARN: u8 = 4;
    pub const SUSPEND: u8 = 5;
    pub const RESUME: u8 = 6;
    pub const MARK: u8 = 7;
    pub const EXPIRE: u8 = 8;
    pub const ADD: u8 = 9;
    pub const REMOVE: u8 = 10;
    pub const DROP_LAST_BLOCK: u8 = 11;
    pub const COUNT: u8 = 12;
}

const MODEL: &str = "m";
const WORKERS: [&str; 2] = ["v", "w"];
/// Bits of [`Match::as_of`] that a registration does not share with others.
const WITHIN_REGISTRATION: u64 = (1 << 41) - 1;

/// Lead two indexes through the life that a script tells. Their tables are ordered by different seeds, so that what one
/// says and the other does not hangs on chance.
///
/// Returns what happened in it, by word.
pub fn life(script: &[u8]) -> BTreeSet<&'static str> {
    let mut script = Script(script);
    let mut pair = Pair::new(script.byte());
    while let Some(step) = script.next_step() {
        let name = WORKERS[usize::from(script.byte()) % WORKERS.len()];
        match step {
            step::APPLY => pair.apply(name, script.payload()),
            step::ASK => pair.ask(name, [script.byte(), script.byte(), script.byte()]),
            step::FORGET => pair.change(name, Worker::forget),
            step::NEW_EPOCH => pair.change(name, Worker::new_epoch),
            step::RELEARN => pair.change(name, Worker::relearn),
            step::SUSPEND => pair.change(name, |worker, _| worker.suspend()),
            step::RESUME => pair.change(name, |worker, _| worker.resume()),
            step::MARK if script.byte() % 2 == 0 => pair.change(name, |worker, _| worker.mark_reannouncing()),
            step::MARK => pair.change(name, |worker, _| worker.mark_hidden_keys()),
            step::EXPIRE => {
                let now = f64::from(script.byte());
                pair.indexes.iter().for_each(|index| index.expire(now));
            }
            step::ADD => pair.add(name, script.byte()),
            step::REMOVE => pair.indexes.iter().for_each(|index| index.remove_worker(name)),
            step::DROP_LAST_BLOCK.. => pair.change(name, |worker, _| worker.drops_last_block()),
        }
        pair.check();
    }
    pair.happened
}

struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    /// 0 behind the end.
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn next_step(&mut self) -> Option<u8> {
        (!self.0.is_empty()).then(|| self.byte() % step::COUNT)
    }

    /// Two bytes of length, and so many bytes, or what is left of them.
    fn payload(&mut self) -> &'a [u8] {
        let length = usize::from(u16::from_le_bytes([self.byte(), self.byte()]));
        let (payload, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        payload
    }
}

struct Pair {
    indexes: [Index; 2],
    max_blocks: Option<u64>,
    told: Told,
    happened: BTreeSet<&'static str>,
}

impl Pair {
    fn new(seed: u8) -> Self {
        let max_blocks = (seed >> 5 & 1 == 1).then_some(24);
        let index = || Index::bounded(Bounds { blocks: max_blocks, bytes: None });
        let pair = Self { indexes: [index(), index()], max_blocks, told: Told::default(), happened: BTreeSet::new() };
        WORKERS.iter().for_each(|name| pair.add(name, seed));
        pair
    }

    fn add(&self, name: &str, seed: u8) {
        let bit = |at: u8| seed >> at & 1 == 1;
        for index in &self.indexes {
            let facts = Facts {
                usable_blocks: bit(0).then_some(8),
                attention_chunk_size: bit(1).then_some(32),
                eagle: bit(2),
                hit_alignment: bit(3).then_some(48),
                rank: bit(4).then_some(0),
            };
            index.add_worker(name, MODEL, facts);
        }
    }

    fn change(&self, name: &str, change: impl Fn(&mut Worker, &mut Shared)) {
        self.indexes.iter().for_each(|index| index.change_named(name, &change));
    }

    fn apply(&mut self, name: &str, payload: &[u8]) {
        self.change(name, |worker, shared| worker.apply_payload(shared, payload));
        if let Ok(batch) = Batch::decode(payload) {
            self.told.take(batch);
        }
    }

    /// Ask for a prompt that some events told of, and tell what an engine answered.
    fn ask(&mut self, name: &str, [which, cached, until]: [u8; 3]) {
        let asked = self.told.prompt(usize::from(which));
        let prompt = Prompt {
            tokens: &asked.tokens,
            model: MODEL,
            adapter: asked.adapter.as_deref(),
            extra: &asked.extra,
            salted: false,
        };
        let [ours, theirs] = self.indexes.each_ref().map(|index| sorted(index.lookup(&prompt)));
        assert_eq!(ours.len(), theirs.len());
        for ((name, mut found), (other, same)) in ours.iter().cloned().zip(theirs.iter().cloned()) {
            check_match(&found, asked.tokens.len());
            self.happened.extend((found.credit > 0).then_some("credit"));
            self.happened.extend((found.expected > 0).then_some("expected"));
            assert_eq!((found.as_of ^ same.as_of) & WITHIN_REGISTRATION, 0);
            found.as_of = same.as_of;
            assert_eq!((name, found), (other, same));
        }
        let observe = |index: &Index, matches: &[(String, Match)]| {
            let found = matches.iter().find(|(other, _)| other == name).map(|(_, found)| found);
            let (credit, as_of) = found.map_or((0, 0), |found| (found.credit, found.as_of));
            let answer = Answer { cached: u64::from(cached) * 4, credit, as_of, until: until.into() };
            let observation = index.observe(name, &prompt, &answer);
            let registered = index.block_sizes(MODEL).iter().any(|(worker, size)| worker.name() == name && *size > 0);
            let expected = if registered { Observation::Steady } else { Observation::Unknown };
            assert_eq!(observation, expected, "nothing went since");
        };
        observe(&self.indexes[0], &ours);
        observe(&self.indexes[1], &theirs);
    }

    fn check(&mut self) {
        let [mut ours, mut theirs] = self.indexes.each_ref().map(Index::describe);
        ours.sort_by(|one, other| one.0.cmp(&other.0));
        theirs.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(ours, theirs);
        let mut blocks = 0;
        for (_, state) in ours {
            assert!(state.guessed <= state.placed && state.placed <= state.blocks && state.blocks <= state.copies);
            assert!(state.doubtful <= state.copies);
            assert!(state.observed == 0 || state.trust != Trust::Exact, "only what is lost is learned from answers");
            self.happened.extend(state.counts.iter().map(|(word, _)| word));
            blocks += state.blocks;
        }
        assert!(self.max_blocks.is_none_or(|most| blocks <= most));
    }
}

fn sorted(found: Vec<(std::sync::Arc<kvsync_index::Registered>, Match)>) -> Vec<(String, Match)> {
    let mut found: Vec<_> = found.into_iter().map(|(worker, found)| (worker.name().to_owned(), found)).collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    found
}

fn check_match(found: &Match, tokens: usize) {
    assert_eq!(found.by_tier.iter().sum::<u64>(), found.credit);
    assert!(found.credit + found.expected < tokens.max(1) as u64, "an engine computes the last token itself");
    assert!(found.trust != Trust::None || found.credit == 0);
}

/// What events told of blocks, whether they are still there or not: prompts to ask for.
#[derive(Default)]
struct Told {
    runs: Vec<Run<'static>>,
    run_of: HashMap<EngineHash<'static>, usize>,
}

#[derive(Default)]
struct Asked {
    tokens: Vec<u32>,
    extra: Vec<Vec<ExtraKey<'static>>>,
    adapter: Option<String>,
}

impl Told {
    const MOST_RUNS: usize = 256;
    const MOST_TOKENS: usize = 1 << 14;

    fn take(&mut self, batch: Batch<'_>) {
        for event in batch {
            if let Event::Stored(stored) = event
                && stored.run.is_dense()
                && !stored.run.hashes.is_empty()
                && stored.run.tokens.len() <= Self::MOST_TOKENS
                && self.runs.len() < Self::MOST_RUNS
            {
                let run = stored.run.to_owned_run();
                for hash in &run.hashes {
                    self.run_of.insert(hash.clone(), self.runs.len());
                }
                self.runs.push(run);
            }
        }
    }

    /// The prompt that ends with one of the runs, as far back as its parents are known.
    fn prompt(&self, which: usize) -> Asked {
        let mut asked = Asked::default();
        let mut at = which.checked_rem(self.runs.len());
        let mut until: Option<&EngineHash<'_>> = None;
        while let Some(run) = at.and_then(|at| self.runs.get(at))
            && asked.tokens.len() + run.tokens.len() <= Self::MOST_TOKENS
        {
            let end = until.and_then(|parent| run.hashes.iter().position(|hash| hash == parent));
            let blocks = end.map_or(run.hashes.len(), |end| end + 1);
            let tokens = run.tokens[..blocks * run.block_size as usize].to_vec();
            let extra: Vec<_> = run
                .blocks()
                .take(blocks)
                .map(|(_, extra)| extra.iter().map(ExtraKey::to_owned_key).collect())
                .collect();
            asked.tokens = [tokens, asked.tokens].concat();
            asked.extra = [extra, asked.extra].concat();
            asked.adapter = match &run.adapter {
                Adapter::Named(name) => Some(name.to_string()),
                Adapter::None | Adapter::Hidden(_) => None,
            };
            until = run.parent.as_ref();
            let before = until.and_then(|parent| self.run_of.get(parent)).copied();
            at = before.filter(|before| Some(*before) != at);
        }
        asked.tokens.push(9);
        asked
    }
}
