//! The commented examples that `tollway init` writes; the first is what runs without a file.

pub const LOCAL_DISCOVERY: &str = include_str!("../../examples/local-discovery.yaml");
pub const HOSTED_DISCOVERY: &str = include_str!("../../examples/hosted-discovery.yaml");
pub const PAYING_LOCAL: &str = include_str!("../../examples/paying-local.yaml");
pub const PAYING_CLUSTER: &str = include_str!("../../examples/paying-cluster.yaml");

pub const ALL: [(&str, &str); 4] = [
    ("local-discovery", LOCAL_DISCOVERY),
    ("hosted-discovery", HOSTED_DISCOVERY),
    ("paying-local", PAYING_LOCAL),
    ("paying-cluster", PAYING_CLUSTER),
];

/// The file of `tollway signer`, which is another kind of file.
pub const SIGNER: (&str, &str) = ("signer", include_str!("../../examples/signer.yaml"));

/// The file of `tollway gate`.
pub const GATE: (&str, &str) = ("gate", include_str!("../../examples/gate.yaml"));
