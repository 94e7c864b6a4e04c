//! `tollway list`: what an MCP server has, with prices.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::Failure;
use crate::config::GateServer;
use crate::gate::Kind;
use crate::gate::listing::{META_ACCEPTS, META_PRICE};
use crate::gate::prices::{Item, Prices};
use crate::gate::proxy::inventory::{Entry, inventory};
use crate::gate::proxy::{HttpUpstream, Upstream};
use crate::gate::target::Target;
use crate::gate_server;
use crate::http::{self, Client, Destination};
use crate::json;
use crate::ports::machine;
use crate::x402::{Flow, Offer};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
With --config the server behind the gate is asked, and the prices are those of the file; one that matches nothing of the
server's is marked. With --url any MCP server is asked, and the prices are those that its listing has.

  tollway list --config gate.yaml
  tollway list --url https://mcp.example.com/mcp --json")]
pub struct ListArgs {
    /// Ask this MCP server (Streamable HTTP), and show the prices that it lists
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// One JSON document on standard output
    #[arg(long)]
    json: bool,
}

struct Row {
    kind: &'static str,
    name: String,
    /// Amount, asset, network, recipient, flow; `None`: it is free.
    price: Option<[String; 5]>,
    note: &'static str,
}

const UNMATCHED: &str = "matches nothing of the server's";
const DENIED: &str = "has no price: not served (gate.default: deny)";

pub async fn of_gate(args: &ListArgs, config: &GateServer) -> Result<ExitCode, Failure> {
    let (world, _tasks) = machine::world();
    let upstream = gate_server::upstream(config, &world, &CancellationToken::new())?;
    let entries = asked(&upstream).await?;
    let mut rows = Vec::new();
    let mut matched = BTreeSet::new();
    for entry in &entries {
        match resolve(&config.gate.prices, entry) {
            Some(item) => {
                matched.insert((item.kind, item.key.clone()));
                rows.extend(priced(item, &entry.key, config.default_pay_to.as_deref(), ""));
            }
            None => {
                let denied =
                    !entry.template && matches!(config.gate.prices.resolve(entry.kind, &entry.key), Target::NotFound);
                rows.push(free(entry, if denied { DENIED } else { "" }));
            }
        }
    }
    // A family of resources may have members that no list names.
    let missing = |item: &&Item| !matched.contains(&(item.kind, item.key.clone()));
    for item in config.gate.prices.items().filter(missing) {
        rows.extend(priced(item, &item.key, config.default_pay_to.as_deref(), UNMATCHED));
    }
    Ok(show(args, &rows))
}

pub async fn of_url(args: &ListArgs, url: &str) -> Result<ExitCode, Failure> {
    let (world, _tasks) = machine::world();
    let url: url::Url = url.parse().map_err(|_| Failure::Usage("--url: is no URL: write https://host/mcp".into()))?;
    let timeout = Duration::from_secs(30);
    let limits = http::Limits { timeout, max_response_bytes: usize::MAX };
    let tls = http::tls(None).map_err(Failure::Failed)?;
    let client = Client::new(world, tls, Destination::Operator, limits);
    let upstream = HttpUpstream::new(client, &url, None, timeout);
    let upstream = Upstream::Http(Arc::new(upstream.map_err(|e| Failure::Usage(format!("--url: {e}")))?));
    let rows: Vec<Row> = asked(&upstream).await?.iter().map(listed).collect();
    Ok(show(args, &rows))
}

async fn asked(upstream: &Upstream) -> Result<Vec<Entry>, Failure> {
    inventory(upstream).await.map_err(|problem| Failure::Failed(format!("the MCP server: {problem}")))
}

fn resolve<'a>(prices: &'a Prices, entry: &Entry) -> Option<&'a Item> {
    if entry.template {
        return prices.items().find(|item| item.kind == entry.kind && item.key == entry.key);
    }
    match prices.resolve(entry.kind, &entry.key) {
        Target::Priced(item) => Some(item),
        Target::Free | Target::NotFound => None,
    }
}

fn kind(entry: &Entry) -> &'static str {
    if entry.template { "template" } else { entry.kind.word() }
}

fn free(entry: &Entry, note: &'static str) -> Row {
    Row { kind: kind(entry), name: entry.key.clone(), price: None, note }
}

/// One row for each offer.
fn priced<'a>(
    item: &'a Item,
    name: &'a str,
    default: Option<&'a str>,
    note: &'static str,
) -> impl Iterator<Item = Row> + 'a {
    let kind = if item.kind == Kind::Resource && item.key.contains('{') && name == item.key {
        "template"
    } else {
        item.kind.word()
    };
    item.offers.iter().map(move |priced| {
        let pay_to = if Some(&*priced.offer.pay_to) == default { "(default)" } else { &priced.offer.pay_to };
        Row {
            kind,
            name: name.to_owned(),
            price: Some([
                priced.shown_amount.clone(),
                priced.shown_asset.clone(),
                priced.offer.network.to_string(),
                pay_to.to_owned(),
                flow(item.flow).to_owned(),
            ]),
            note,
        }
    })
}

fn flow(flow: Flow) -> &'static str {
    match flow {
        Flow::Upfront => "upfront",
        _ => "authorization",
    }
}

/// What a gate's own listing says.
fn listed(entry: &Entry) -> Row {
    let meta = json::member(&entry.raw, "_meta");
    let text = |name: &str| {
        let price = json::member(meta?, META_PRICE)?;
        json::member(price, name).and_then(json::string).map(std::borrow::Cow::into_owned)
    };
    let Some(amount) = text("amount") else { return free(entry, "") };
    let accepts = meta.and_then(|meta| json::member(meta, META_ACCEPTS)).and_then(json::elements).unwrap_or_default();
    let first = accepts.first().and_then(|raw| Offer::parse(raw).ok());
    let flow = first.as_ref().map_or("", |offer| flow(offer.flow()));
    let pay_to = text("payTo").or_else(|| first.as_ref().map(|offer| offer.pay_to.clone()));
    let price = [
        amount,
        text("asset").unwrap_or_default(),
        text("network").unwrap_or_default(),
        pay_to.unwrap_or_default(),
        flow.to_owned(),
    ];
    Row { kind: kind(entry), name: entry.key.clone(), price: Some(price), note: "" }
}

const HEAD: [&str; 7] = ["type", "name", "price", "asset", "network", "payTo", "flow"];

fn show(args: &ListArgs, rows: &[Row]) -> ExitCode {
    if args.json {
        let items: Vec<_> = rows
            .iter()
            .map(|row| {
                let mut item = json!({"type": row.kind, "name": row.name, "free": row.price.is_none()});
                for (name, value) in HEAD[2..].iter().zip(row.price.iter().flatten()) {
                    item[*name] = json!(value);
                }
                if !row.note.is_empty() {
                    item["note"] = json!(row.note);
                }
                item
            })
            .collect();
        say!("{}", json!({"items": items}));
        return ExitCode::SUCCESS;
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let mut cells = vec![row.kind.to_owned(), printable(&row.name)];
            match &row.price {
                Some(price) => cells.extend(price.iter().map(|cell| printable(cell))),
                None => cells.extend(["(free)".to_owned(), String::new(), String::new(), String::new(), String::new()]),
            }
            cells
        })
        .collect();
    let width = |i: usize| cells.iter().map(|row| row[i].chars().count()).chain([HEAD[i].len()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let line = |row: &[String], note: &str| {
        let padded: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let mark = if note.is_empty() { String::new() } else { format!("  ! {note}") };
        format!("{}{mark}", padded.join("  ").trim_end())
    };
    say!("{}", line(&HEAD.map(str::to_owned), ""));
    for (row, cells) in rows.iter().zip(&cells) {
        say!("{}", line(cells, row.note));
    }
    ExitCode::SUCCESS
}

/// A server's words, on one line of a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}
