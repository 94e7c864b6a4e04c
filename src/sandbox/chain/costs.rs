//! What each host operation costs: `(name, constant CPU, linear CPU, constant memory, linear memory)`. These are the
//! calibrated defaults of soroban-env-host 30.0.0, printed from `Budget::default()` once; the host gives them out in no
//! other form. A test compares them, so that a new host version cannot slip in with old prices.

use stellar_xdr::{ContractCostParamEntry, ContractCostParams, ExtensionPoint};

/// CPU instructions and memory bytes, in the order of `ContractCostType`.
pub fn cost_params() -> Result<(ContractCostParams, ContractCostParams), stellar_xdr::Error> {
    let entry = |constant, linear| ContractCostParamEntry {
        ext: ExtensionPoint::V0,
        const_term: constant,
        linear_term: linear,
    };
    let cpu: Vec<_> = TABLE.iter().map(|&(_, constant, linear, _, _)| entry(constant, linear)).collect();
    let memory: Vec<_> = TABLE.iter().map(|&(_, _, _, constant, linear)| entry(constant, linear)).collect();
    Ok((ContractCostParams(cpu.try_into()?), ContractCostParams(memory.try_into()?)))
}

#[rustfmt::skip]
const TABLE: [(&str, i64, i64, i64, i64); 95] = [
    ("WasmInsnExec", 4, 0, 0, 0),
    ("MemAlloc", 434, 16, 16, 128),
    ("MemCpy", 42, 16, 0, 0),
    ("MemCmp", 44, 16, 0, 0),
    ("DispatchHostFunction", 295, 0, 0, 0),
    ("VisitObject", 60, 0, 0, 0),
    ("ValSer", 221, 26, 242, 384),
    ("ValDeser", 331, 4369, 0, 384),
    ("ComputeSha256Hash", 3636, 7013, 0, 0),
    ("ComputeEd25519PubKey", 40256, 0, 0, 0),
    ("VerifyEd25519Sig", 377551, 4059, 0, 0),
    ("VmInstantiation", 417482, 45712, 132773, 4903),
    ("VmCachedInstantiation", 41142, 634, 69472, 1217),
    ("InvokeVmFunction", 1945, 0, 14, 0),
    ("ComputeKeccak256Hash", 6481, 5943, 0, 0),
    ("DecodeEcdsaCurve256Sig", 711, 0, 0, 0),
    ("RecoverEcdsaSecp256k1Key", 2314804, 0, 181, 0),
    ("Int256AddSub", 4176, 0, 99, 0),
    ("Int256Mul", 4716, 0, 99, 0),
    ("Int256Div", 4680, 0, 99, 0),
    ("Int256Pow", 4256, 0, 99, 0),
    ("Int256Shift", 884, 0, 99, 0),
    ("ChaCha20DrawBytes", 1059, 502, 0, 0),
    ("ParseWasmInstructions", 73077, 25410, 17564, 6457),
    ("ParseWasmFunctions", 0, 540752, 0, 47464),
    ("ParseWasmGlobals", 0, 176363, 0, 13420),
    ("ParseWasmTableEntries", 0, 29989, 0, 6285),
    ("ParseWasmTypes", 0, 1061449, 0, 64670),
    ("ParseWasmDataSegments", 0, 237336, 0, 29074),
    ("ParseWasmElemSegments", 0, 328476, 0, 48095),
    ("ParseWasmImports", 0, 701845, 0, 103229),
    ("ParseWasmExports", 0, 429383, 0, 36394),
    ("ParseWasmDataSegmentBytes", 0, 28, 0, 257),
    ("InstantiateWasmInstructions", 43030, 0, 70704, 0),
    ("InstantiateWasmFunctions", 0, 7556, 0, 14613),
    ("InstantiateWasmGlobals", 0, 10711, 0, 6833),
    ("InstantiateWasmTableEntries", 0, 3300, 0, 1025),
    ("InstantiateWasmTypes", 0, 0, 0, 0),
    ("InstantiateWasmDataSegments", 0, 23038, 0, 129632),
    ("InstantiateWasmElemSegments", 0, 42488, 0, 13665),
    ("InstantiateWasmImports", 0, 828974, 0, 97637),
    ("InstantiateWasmExports", 0, 297100, 0, 9176),
    ("InstantiateWasmDataSegmentBytes", 0, 14, 0, 126),
    ("Sec1DecodePointUncompressed", 1882, 0, 0, 0),
    ("VerifyEcdsaSecp256r1Sig", 3000906, 0, 0, 0),
    ("Bls12381EncodeFp", 661, 0, 0, 0),
    ("Bls12381DecodeFp", 985, 0, 0, 0),
    ("Bls12381G1CheckPointOnCurve", 1934, 0, 0, 0),
    ("Bls12381G1CheckPointInSubgroup", 730510, 0, 0, 0),
    ("Bls12381G2CheckPointOnCurve", 5921, 0, 0, 0),
    ("Bls12381G2CheckPointInSubgroup", 1057822, 0, 0, 0),
    ("Bls12381G1ProjectiveToAffine", 92642, 0, 0, 0),
    ("Bls12381G2ProjectiveToAffine", 100742, 0, 0, 0),
    ("Bls12381G1Add", 7689, 0, 0, 0),
    ("Bls12381G1Mul", 2458985, 0, 0, 0),
    ("Bls12381G1Msm", 2347584, 94135478, 109494, 266603),
    ("Bls12381MapFpToG1", 1020885, 0, 2776, 0),
    ("Bls12381HashToG1", 2638451, 6803, 5896, 0),
    ("Bls12381G2Add", 25207, 0, 0, 0),
    ("Bls12381G2Mul", 7873219, 0, 0, 0),
    ("Bls12381G2Msm", 7663880, 298580871, 219654, 266603),
    ("Bls12381MapFp2ToG2", 1856539, 0, 1672, 0),
    ("Bls12381HashToG2", 6315452, 7232, 3960, 0),
    ("Bls12381Pairing", 10558948, 632860943, 2204, 9340474),
    ("Bls12381FrFromU256", 1994, 0, 0, 0),
    ("Bls12381FrToU256", 1155, 0, 248, 0),
    ("Bls12381FrAddSub", 74, 0, 0, 0),
    ("Bls12381FrMul", 332, 0, 0, 0),
    ("Bls12381FrPow", 691, 74558, 0, 128),
    ("Bls12381FrInv", 35421, 0, 0, 0),
    ("Bn254EncodeFp", 344, 0, 0, 0),
    ("Bn254DecodeFp", 476, 0, 0, 0),
    ("Bn254G1CheckPointOnCurve", 904, 0, 0, 0),
    ("Bn254G2CheckPointOnCurve", 2811, 0, 0, 0),
    ("Bn254G2CheckPointInSubgroup", 1706052, 0, 0, 0),
    ("Bn254G1ProjectiveToAffine", 61, 0, 0, 0),
    ("Bn254G1Add", 3623, 0, 0, 0),
    ("Bn254G1Mul", 1150435, 0, 0, 0),
    ("Bn254Pairing", 5263916, 392472814, 1821, 6232546),
    ("Bn254FrFromU256", 2052, 0, 0, 0),
    ("Bn254FrToU256", 1133, 0, 312, 0),
    ("Bn254FrAddSub", 74, 0, 0, 0),
    ("Bn254FrMul", 332, 0, 0, 0),
    ("Bn254FrPow", 755, 68930, 0, 0),
    ("Bn254FrInv", 33151, 0, 0, 0),
    ("Bn254G1Msm", 1185193, 41568084, 73061, 229779),
    ("MlDsa44DecodeVerifyingKey", 849110, 0, 24656, 0),
    ("MlDsa65DecodeVerifyingKey", 1505271, 0, 43088, 0),
    ("MlDsa87DecodeVerifyingKey", 2625760, 0, 73808, 0),
    ("MlDsa44DecodeSignature", 37888, 0, 4104, 0),
    ("MlDsa65DecodeSignature", 47691, 0, 5128, 0),
    ("MlDsa87DecodeSignature", 66346, 0, 7176, 0),
    ("VerifyMlDsa44Sig", 685165, 6103, 0, 0),
    ("VerifyMlDsa65Sig", 983619, 6103, 0, 0),
    ("VerifyMlDsa87Sig", 1437210, 6102, 0, 0),
];

#[cfg(test)]
mod tests {
    use super::*;
    use soroban_env_host::budget::Budget;
    use stellar_xdr::ContractCostType;

    #[test]
    fn the_table_is_the_hosts_own() {
        let debug = format!("{:?}", Budget::default());
        let types = ContractCostType::variants();
        assert_eq!(types.len(), TABLE.len());
        for (cost, row) in types.iter().zip(TABLE) {
            let name = format!("{cost:?}");
            let line = debug.lines().find(|line| line.split_whitespace().next() == Some(&name)).unwrap();
            let mut columns = line.split_whitespace().rev().map(|n| n.parse::<i64>().unwrap());
            let mut last = || columns.next().unwrap();
            let (linear_memory, memory, linear_cpu, cpu) = (last(), last(), last(), last());
            assert_eq!(row, (name.as_str(), cpu, linear_cpu, memory, linear_memory));
        }
    }
}
