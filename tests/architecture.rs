//! Who may use whom: the order of the modules in `src/lib.rs` is the direction of every dependency, and the names of
//! axum, SQL and the sandbox appear only where they belong.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Back edges that are wanted, with the reason.
const ALLOWED: [(&str, &str, &str); 0] = [];

#[test]
fn modules_use_only_what_stands_before_them() {
    let order = modules();
    let rank = |name: &str| order.iter().position(|m| m == name);
    let mut wrong = Vec::new();
    for (file, module) in sources(&order) {
        for used in used_modules(&code(&file), &order) {
            let allowed = ALLOWED.iter().any(|(from, to, _)| *from == module && *to == used);
            if rank(&used) > rank(&module) && !allowed {
                wrong
                    .push(format!("{} uses crate::{used}, which stands behind {module} in src/lib.rs", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn outside_names_stay_where_they_belong() {
    // (what is named, which top-level modules may name it). The signer role is a server with a book of its own inside a
    // module that is neither.
    let rules: [(&str, &[&str]); 9] = [
        ("axum", &["mcp", "agent", "gate/proxy", "gate_server", "sandbox", "signer/role", "signer/role/store"]),
        ("sqlx", &["ledger", "signer/role/store", "gate/claims"]),
        // One file of it, see below.
        ("kube", &["agent"]),
        ("k8s_openapi", &["agent"]),
        ("jsonwebtoken", &["mcp"]),
        ("prometheus", &["telemetry"]),
        ("soroban_env_host", &["sandbox"]),
        ("clap", &["cli", "sandbox"]),
        ("anyhow", &["cli", "sandbox"]),
    ];
    let order = modules();
    let mut wrong = Vec::new();
    for (file, module) in sources(&order) {
        let code = code(&file);
        let within = |part: &str| file.strip_prefix(root().join("src")).is_ok_and(|file| file.starts_with(part));
        let module = ["signer/role/store", "signer/role", "gate/claims", "gate/proxy"]
            .into_iter()
            .find(|part| within(part))
            .unwrap_or(&module);
        for (name, allowed) in rules {
            if names_crate(&code, name) && !allowed.contains(&module) {
                wrong.push(format!("{} names {name}", file.display()));
            }
        }
        let cluster = ["kube", "k8s_openapi"].iter().any(|name| names_crate(&code, name));
        if cluster && !file.ends_with("agent/auth/token_review.rs") {
            wrong.push(format!("{} knows of Kubernetes", file.display()));
        }
        for word in ["INSERT INTO", "SELECT ", "UPDATE payments"] {
            if code.contains(word) && !["ledger", "signer/role/store", "gate/claims"].contains(&module) {
                wrong.push(format!("{} contains SQL ({word})", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_its_command_reaches_the_sandbox() {
    let order = modules();
    for (file, module) in sources(&order) {
        if module != "sandbox" && used_modules(&code(&file), &order).contains("sandbox") {
            assert_eq!(module, "cli", "{} uses the sandbox", file.display());
        }
    }
}

/// The modules of `src/lib.rs` in their order.
fn modules() -> Vec<String> {
    let lib = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let names: Vec<String> =
        lib.lines().filter_map(|l| l.strip_prefix("pub mod ")?.strip_suffix(';')).map(Into::into).collect();
    assert!(names.len() > 10 && names[0] == "json", "src/lib.rs is not the map that this test reads: {names:?}");
    names
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every source file with its top-level module; `main.rs` and `lib.rs` are wiring and have none.
fn sources(order: &[String]) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    walk(&root().join("src"), &mut files);
    let found: Vec<(PathBuf, String)> = files
        .into_iter()
        .filter_map(|file| {
            let relative = file.strip_prefix(root().join("src")).ok()?;
            let first = relative.components().next()?.as_os_str().to_str()?;
            let module = first.strip_suffix(".rs").unwrap_or(first).to_owned();
            order.contains(&module).then_some((file, module))
        })
        .collect();
    assert!(found.len() > 15, "only {} source files were found", found.len());
    found
}

fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// The file without comments and without what stands behind its first `#[cfg(test)]` (tests stand last). A file that is
/// a test as a whole (`tests.rs`, `table.rs`) may use what it likes.
fn code(file: &Path) -> String {
    let name = file.file_name().unwrap().to_str().unwrap();
    if matches!(name, "tests.rs" | "table.rs") || file.components().any(|c| c.as_os_str() == "tests") {
        return String::new();
    }
    let text = fs::read_to_string(file).unwrap();
    let production = text.split("#[cfg(test)]\nmod ").next().unwrap_or("");
    production
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .fold(String::new(), |all, line| all + line + "\n")
}

/// Top-level modules named as `crate::x`, also inside `use crate::{x, y::z}`.
fn used_modules(code: &str, order: &[String]) -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let preceded = code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_');
        if preceded {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut start = true;
            let mut word = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => start = true,
                    c if depth == 0 && start && (c.is_alphanumeric() || c == '_') => word.push(c),
                    c if depth == 0 && start && !word.is_empty() && !c.is_whitespace() => start = false,
                    _ => {}
                }
                if (c == ',' || !start) && !word.is_empty() {
                    used.insert(std::mem::take(&mut word));
                }
            }
            used.insert(word);
        } else {
            used.insert(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    used.into_iter().filter(|name| order.contains(name)).collect()
}

fn names_crate(code: &str, name: &str) -> bool {
    code.match_indices(&format!("{name}::"))
        .any(|(at, _)| !code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':'))
}

#[test]
fn the_reader_of_uses_sees_every_form() {
    let order: Vec<String> = ["money", "http", "ledger", "pay"].map(String::from).to_vec();
    let code = "use crate::money::Amount;\nuse crate::{http::{Client, Tls}, ledger};\nfn f(x: crate::pay::Payer) {}\n";
    let all: Vec<String> = used_modules(code, &order).into_iter().collect();
    assert_eq!(all, ["http", "ledger", "money", "pay"]);
    assert!(names_crate("let x = axum::Router::new();", "axum"));
    assert!(!names_crate("let x = my_axum::Router::new();", "axum"));
}
