//! The cap: three replicas, 300 calls at once of 0.30 USDC against 10 USDC a day. While replicas are killed never more
//! than 33 of them hold or have spent money; once what was left open is swept and the calls are made again, it is
//! exactly 33.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::time::Instant;

use crate::parts::audit::{Broken, audit, open_payments};
use crate::parts::buyer::{End, Purchase, Story};
use crate::parts::cluster::{Cluster, Plan, clear_of_midnight};
use crate::parts::market::Terms;
use crate::parts::rng::Rng;
use crate::parts::watch::Watch;
use crate::report::{Report, Result};

const PRICE: u64 = 3_000_000;
const CAP: u64 = 100_000_000;
const PASS: usize = 33;
const AGENT: &str = "capped";

#[derive(clap::Args)]
pub struct Args {
    /// Calls at once
    #[arg(long, default_value_t = 300)]
    calls: usize,
    /// Replicas that are killed meanwhile, one after the other
    #[arg(long, default_value_t = 6)]
    kills: u64,
    /// Of the choices which replica is killed when
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub async fn run(args: Args) -> Result<Report> {
    clear_of_midnight(Duration::from_secs(300)).await;
    let mut cluster = Cluster::start(Plan {
        terms: Terms { ledger: Duration::from_secs(1), life: 20, price: PRICE, hostile: 0, seed: args.seed },
        replicas: 3,
        standby: false,
        agents: vec![(AGENT.into(), CAP)],
        patience: Duration::from_secs(15),
    })
    .await?;
    let caps = BTreeMap::from([(AGENT.to_owned(), CAP)]);
    let watch = Watch::start(cluster.database.clone(), cluster.market.network.clone(), caps.clone());
    let rng = Arc::new(Rng::new(args.seed, "cap"));

    let calm = Arc::new(AtomicBool::new(false));
    let purchases = (0..args.calls).map(|n| {
        let purchase = Purchase {
            agent: cluster.agents[0].clone(),
            call: cluster.call(&format!("City {n}")),
            key: format!("cap-{:04}-of-a-purchase", n),
        };
        tokio::spawn(insist(purchase, rng.clone(), calm.clone()))
    });
    let purchases: Vec<_> = purchases.collect();
    let mut met = 0;
    for kill in 1..=args.kills {
        tokio::time::sleep(Duration::from_millis(rng.between(50, 700))).await;
        let n = usize::try_from(rng.below(3)).unwrap_or(0);
        let replica = &mut cluster.replicas[n];
        let open = open_payments(&cluster.database).await?;
        replica.kill().await?;
        eprintln!("kill {kill}: {} with {open} payments open", replica.name);
        met += u64::from(open > 0);
        replica.start().await?;
    }
    // What the killed ones left open ends by itself; the calls that found no room meanwhile are made again.
    let until = Instant::now() + Duration::from_secs(240);
    loop {
        let seen = watch.seen();
        if seen.open == 0 && seen.settled >= PASS as u64 || Instant::now() > until {
            break;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    eprintln!("{} settled, {} open; the others ask once more", watch.seen().settled, watch.seen().open);
    calm.store(true, Ordering::SeqCst);
    let mut stories: Vec<Story> = join_all(purchases).await.into_iter().filter_map(std::result::Result::ok).collect();
    stories.sort_by(|a, b| a.key.cmp(&b.key));

    let mut broken = Broken::default();
    let found = audit(&cluster, &stories, &caps, &mut broken).await?;
    let seen = watch.seen();
    seen.broken
        .values()
        .for_each(|how| broken.note("the cap holds at every moment, and rows end in time", how.clone()));
    if args.kills > 0 && met == 0 {
        broken.note("a replica is killed while payments are open", format!("none of {}", args.kills));
    }
    if found.settled != PASS {
        broken.note("exactly 33 pass in the end", found.settled.to_string());
    }
    let ended = |end: &End| stories.iter().filter(|story| story.end == *end).count();
    let (outputs, undelivered, refused) = (ended(&End::Output), ended(&End::Undelivered), ended(&End::Refused));
    if (outputs + undelivered, refused) != (PASS, args.calls - PASS) {
        broken.note("33 have their output, the others know that there is no room", format!("{outputs} and {refused}"));
    }
    let broken = broken.list();
    if !broken.is_empty() {
        eprintln!("the replicas' logs are in {}", cluster.keep().display());
    }
    Ok(Report::of_promises(
        "cap",
        json!({
            "calls": args.calls, "kills": args.kills, "killsWithPaymentsOpen": met, "balancer": cluster.balancer.kind,
            "settled": found.settled, "transfers": found.transfers, "released": found.released,
            "outputs": outputs, "undelivered": undelivered, "refused": refused,
            "looks": seen.looks, "mostHeldAndSpentPermilleOfTheCap": seen.fullest_permille,
            "latestEndMs": seen.latest_ms,
        }),
        &broken,
    ))
}

/// Also of a call that finds no room, until the world is calm.
async fn insist(purchase: Purchase, rng: Arc<Rng>, calm: Arc<AtomicBool>) -> Story {
    let patience = Duration::from_secs(300);
    purchase
        .make(&rng, |story, taken| taken > patience || story.end == End::Refused && calm.load(Ordering::SeqCst))
        .await
}
