//! A metric family as a constant: name, labels, help. With the feature `roles` the `prometheus` crate counts; the library
//! without it counts nothing, and needs no such crate.
#![cfg_attr(not(feature = "roles"), allow(unused_variables, dead_code, reason = "nothing is counted"))]

#[cfg(feature = "roles")]
use std::sync::{LazyLock, OnceLock};

#[cfg(feature = "roles")]
use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};

/// All families of this process.
#[cfg(feature = "roles")]
static REGISTRY: LazyLock<Registry> = LazyLock::new(Registry::new);

/// What a family is, for the table of `docs/metrics.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Described {
    pub name: &'static str,
    pub kind: &'static str,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

pub trait Family: Sync {
    fn described(&'static self) -> Described;
    /// Makes it known, with a zero for each of its seeds: a counter that is absent until its first event hides that event
    /// from `rate()`.
    fn begin(&'static self);
}

/// Counts up. `seeds`: the label values that are there from the start.
pub struct Counter<const N: usize> {
    name: &'static str,
    labels: [&'static str; N],
    seeds: &'static [[&'static str; N]],
    help: &'static str,
    #[cfg(feature = "roles")]
    vec: OnceLock<Option<IntCounterVec>>,
}

/// Goes up and down.
pub struct Gauge<const N: usize> {
    name: &'static str,
    labels: [&'static str; N],
    seeds: &'static [[&'static str; N]],
    help: &'static str,
    #[cfg(feature = "roles")]
    vec: OnceLock<Option<GaugeVec>>,
}

/// How often a value was at most each of `buckets`.
pub struct Histogram<const N: usize> {
    name: &'static str,
    labels: [&'static str; N],
    seeds: &'static [[&'static str; N]],
    help: &'static str,
    buckets: &'static [f64],
    #[cfg(feature = "roles")]
    vec: OnceLock<Option<HistogramVec>>,
}

impl<const N: usize> Counter<N> {
    pub(super) const fn new(
        name: &'static str,
        labels: [&'static str; N],
        seeds: &'static [[&'static str; N]],
        help: &'static str,
    ) -> Self {
        Counter {
            name,
            labels,
            seeds,
            help,
            #[cfg(feature = "roles")]
            vec: OnceLock::new(),
        }
    }

    /// The label values that are there from the start.
    pub fn seeds(&self) -> &'static [[&'static str; N]] {
        self.seeds
    }

    pub fn one(&self, values: [&str; N]) {
        self.add(values, 1);
    }

    pub fn add(&self, values: [&str; N], more: u64) {
        #[cfg(feature = "roles")]
        if let Some(vec) = self.vec() {
            vec.with_label_values(&values).inc_by(more);
        }
    }

    #[cfg(feature = "roles")]
    fn vec(&self) -> Option<&IntCounterVec> {
        let made = self.vec.get_or_init(|| {
            let vec = IntCounterVec::new(Opts::new(self.name, self.help), &self.labels).ok()?;
            known(vec)
        });
        made.as_ref()
    }
}

impl<const N: usize> Gauge<N> {
    pub(super) const fn new(
        name: &'static str,
        labels: [&'static str; N],
        seeds: &'static [[&'static str; N]],
        help: &'static str,
    ) -> Self {
        Gauge {
            name,
            labels,
            seeds,
            help,
            #[cfg(feature = "roles")]
            vec: OnceLock::new(),
        }
    }

    pub fn set(&self, values: [&str; N], to: f64) {
        #[cfg(feature = "roles")]
        if let Some(vec) = self.vec() {
            vec.with_label_values(&values).set(to);
        }
    }

    pub fn add(&self, values: [&str; N], more: f64) {
        #[cfg(feature = "roles")]
        if let Some(vec) = self.vec() {
            vec.with_label_values(&values).add(more);
        }
    }

    #[cfg(feature = "roles")]
    fn vec(&self) -> Option<&GaugeVec> {
        let made = self.vec.get_or_init(|| {
            let vec = GaugeVec::new(Opts::new(self.name, self.help), &self.labels).ok()?;
            known(vec)
        });
        made.as_ref()
    }
}

impl Gauge<0> {
    /// One more, until the guard is dropped.
    pub fn hold(&'static self) -> Held {
        self.add([], 1.0);
        Held(self)
    }
}

/// One of what a gauge counts.
#[must_use]
pub struct Held(&'static Gauge<0>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.add([], -1.0);
    }
}

impl<const N: usize> Histogram<N> {
    pub(super) const fn new(
        name: &'static str,
        labels: [&'static str; N],
        seeds: &'static [[&'static str; N]],
        help: &'static str,
        buckets: &'static [f64],
    ) -> Self {
        Histogram {
            name,
            labels,
            seeds,
            help,
            buckets,
            #[cfg(feature = "roles")]
            vec: OnceLock::new(),
        }
    }

    pub fn observe(&self, values: [&str; N], value: f64) {
        #[cfg(feature = "roles")]
        if let Some(vec) = self.vec() {
            vec.with_label_values(&values).observe(value);
        }
    }

    #[cfg(feature = "roles")]
    fn vec(&self) -> Option<&HistogramVec> {
        let made = self.vec.get_or_init(|| {
            let opts = HistogramOpts::new(self.name, self.help).buckets(self.buckets.to_vec());
            let vec = HistogramVec::new(opts, &self.labels).ok()?;
            known(vec)
        });
        made.as_ref()
    }
}

/// A name that is there twice would be a second family of the same name: it is left out, and a test finds it.
#[cfg(feature = "roles")]
fn known<T: prometheus::core::Collector + Clone + 'static>(vec: T) -> Option<T> {
    REGISTRY.register(Box::new(vec.clone())).ok()?;
    Some(vec)
}

macro_rules! family {
    ($kind:ident, $word:literal) => {
        impl<const N: usize> Family for $kind<N> {
            fn described(&'static self) -> Described {
                Described { name: self.name, kind: $word, labels: &self.labels, help: self.help }
            }
            fn begin(&'static self) {
                #[cfg(feature = "roles")]
                if let Some(vec) = self.vec() {
                    for values in self.seeds {
                        vec.with_label_values(values);
                    }
                    if N == 0 {
                        vec.with_label_values::<&str>(&[]);
                    }
                }
            }
        }
    };
}
family!(Counter, "counter");
family!(Gauge, "gauge");
family!(Histogram, "histogram");

/// Everything that was counted, in the Prometheus text format (version 0.0.4).
#[cfg(feature = "roles")]
pub(super) fn text() -> Result<String, prometheus::Error> {
    prometheus::TextEncoder::new().encode_to_string(&REGISTRY.gather())
}

#[cfg(feature = "roles")]
pub(super) const TEXT: &str = prometheus::TEXT_FORMAT;
