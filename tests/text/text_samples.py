"""Text that byte-level tokenizers get wrong."""

import unicodedata

SAMPLES = {
    "english": "It's 3 o'clock; they'LL don't-we've said: \"naïve café\" costs $1,234.50!",
    "chinese": "床前明月光，疑是地上霜。举头望明月，低头思故乡。𠮷野家と㐂",
    "japanese": "吾輩は猫である。名前はまだ無い。ｶﾀｶﾅ ﾊﾝｶｸ",
    "korean": "동해 물과 백두산이 마르고 닳도록",
    "arabic": "السَّلَامُ عَلَيْكُمْ وَرَحْمَةُ اللَّهِ",
    "hindi": "नमस्ते दुनिया, क्षत्रिय",
    "thai": "ภาษาไทยไม่มีช่องว่าง",
    "russian": "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "vietnamese": "Tiếng Việt có nhiều dấu thanh điệu",
    "emoji": "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇯🇵🇧🇷 ☺️ ✊🏿 1️⃣ 🫠🪿🙂",
    "combining": "e\u0301 a\u0308\u0323 o\u0328\u0304 Z\u0351\u036b\u0343a\u0334l\u0300g\u0321",
    "mathematics": "∀ε>0 ∃δ: |x−a|<δ ⇒ |ƒ(x)−L|<ε, 𝔸𝕓𝒞 ∑ᵢ xᵢ² ≤ ½",
    "spaces": "  two\t\ttabs \r\n\r\n   \n lines \u00a0\u3000\u200b\ufeff end   ",
    "python": 'def f(x: int) -> str:\n    return f"{x!r:>10}"  # ünï\n\n\nclass A(B):\n\tpass\n',
    "c++": "template<typename T>\nauto&& g(T&& t){ return std::forward<T>(t); } // 0xFFu >>= 3;",
    "json": '{"key": [1, 2.5e-3, null, true], "\\u00e9": "a\\nb"}',
    "replacement": "a real � character, then \x00 and \x7f",
}
EVERYTHING = unicodedata.normalize("NFC", "\n".join(SAMPLES.values()))
