use super::*;

fn network(options: Options) -> LocalNetwork {
    LocalNetwork::start(options, crate::ports::machine::world().0).unwrap()
}

fn by_hand() -> Options {
    Options { ledger_interval: None, seed: Some([7; 32]), ..Options::default() }
}

#[tokio::test]
async fn its_asset_has_the_address_that_everybody_knows() {
    let network = network(by_hand());
    let chain = lock(&network.inner.chain);
    assert_eq!(chain.contract.to_string(), USDC);
}
