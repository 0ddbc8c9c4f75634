"""Words that mean something in an answer: functions, relations, units, numbers, and words that may change a value."""

from __future__ import annotations

import re
from fractions import Fraction


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = word_set("""
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt cbrt abs floor ceil gcd lcm max min
    """)
GREEK = word_set("""
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi
    varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar
    """)
RELATIONS = {
    "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "~": "approx",
    "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">",
    "ne": "!=", "neq": "!=", "approx": "approx", "sim": "approx", "simeq": "approx", "cong": "approx",
    "in": "in", "notin": "notin", "equiv": "equiv", "propto": "propto", "mid": "mid", "nmid": "nmid",
    "to": "to", "rightarrow": "to", "Rightarrow": "to", "implies": "to", "iff": "iff", "Leftrightarrow": "iff",
    "subset": "subset", "subseteq": "subset", "perp": "perp", "parallel": "parallel",
}  # fmt: skip
TEXT_MACROS = word_set("text textbf textit textrm texttt textsf textnormal mbox hbox mathrm operatorname emph")
STYLE_MACROS = word_set("""
    mathbf mathit mathsf mathtt boldsymbol bm pmb boxed fbox framebox underline ensuremath
    """)
# Over a letter they name another quantity; over a number they make it another number, or nothing known.
ACCENTS = word_set("""
    overline bar hat widehat vec overrightarrow overleftrightarrow tilde widetilde dot ddot check breve acute grave
    """)
MATRICES = word_set("pmatrix bmatrix matrix vmatrix array smallmatrix Bmatrix")
IGNORED_COMMANDS = word_set("""
    mathop rm bf it sf tt strut nobreak allowbreak checkmark square blacksquare qed phantom
    """)
# Two- and three-letter runs that are words or units even where letters may be symbols.
SHORT_WORDS = word_set("""
    is it as at an am be by do go he if in me my no of on or so to up us we all and any are but can day etc for get
    has how its let mod non not now one our out per sum the two via was way who why yes you ten six men car cat dog
    boy box bag cup hr hrs min sec mph kph ft yd mi lb lbs oz cm mm km kg mg ml dl cl nm gm pt qt gal rad deg amp
    ohm usd eur gbp sq cu cc hz pts pcs may jan feb mar apr jun jul aug sep oct nov dec sun mon tue wed thu fri sat
    odd red set
    """)

COPULAS = word_set("is are equals equal be was were becomes gives yields 等于")
HEDGES = word_set("approximately about around roughly nearly almost approx circa ca estimated")
# A line with one of these and a number may mean another number, several, or none.
UNSAFE = HEDGES | word_set("""
    not no never neither nor none isn't aren't wasn't doesn't don't cannot can't won't without except excluding
    ain't aint isnt arent wasnt weren't werent doesnt dont cant wont hardly barely scarcely neg
    unless either between than less more fewer greater least most above below under over up beyond within exceeds
    exceed bigger smaller larger upto until to through thru from versus vs plus minus times divided
    multiplied multiply multiplying divide dividing add adding subtract subtracting half halves twice double thrice
    triple
    quarter quarters third thirds fourth fourths fifth fifths sixth tenth tenths hundredth hundredths squared cubed
    square-root cube-root root factorial power mod modulo base choose log inverse reciprocal couple pair few
    several many any anything all every each other another else both maybe perhaps possibly probably might may could
    would should can guess unsure uncertain unknown unclear likely think wrong incorrect false untrue invalid
    impossible undefined infinite nan reject rejected extraneous discarded spurious inadmissible
    if depending whichever whatever but however although instead
    rather alternatively alternative and or xor et oder plusminus give take etc ish
    nicht kein keine nein ohne pas moins sans presque menos casi nao não quase niet geen ikke inte nie не нет минус
    import eval exec print echo lambda def return system drop select true
    """)
UNSAFE_CHINESE = re.compile("[或和与约不非没无未超多少大小至到间倍半万亿千百几余除乘加减另若负]|[高低介]于|近")
# Right before a value these make it part of another one, `a multiple of 42`, except after the words given.
LEADING = {
    "of": word_set("""
        total sum value values maximum minimum max min probability area volume perimeter circumference length width
        height radius diameter distance speed rate cost price amount age score answer result count average mean
        median difference remainder quantity weight mass temperature time profit angle measure
        """),
    "by": word_set("given denoted represented obtained"),
    **dict.fromkeys(
        word_set("""
            before after like preceding succeeding following divides dividing divide past per near nearing approaching
            exceeding containing opposite complement negation conjugate successor predecessor next previous
            hex hexadecimal octal binary
            """),
        frozenset[str](),
    ),
}
LEADING_CHINESE = re.compile("[第前后]$")
# Right after a number these multiply it, or make it a position.
TRAILING = word_set("""
    lakh lakhs crore crores bn mn mil mio gross score tens hundreds thousands millions billions trillions dozens
    """)
# `42 in hex`, `42 octal`, `42 negative`; before a noun, `42 binary strings`, they say something of that.
BASES = word_set("hex hexadecimal octal binary")
TRAILING_ALONE = BASES | {"negative", "debt", "the red", "arrears", "deficit"}
# Beside a box, where more prose is usual, only these take its value back or offer another.
BESIDE_A_BOX = HEDGES | word_set("""
    or not either maybe perhaps between isn't isnt ain't aint wasn't wasnt aren't arent never neither nor hardly barely
    scarcely neg
    """)
# What a number counts ends at one of these, `42 boys in the class`; and what may stand for anything that is counted.
NO_NOUNS = word_set("""
    in of at on for per that who which to the a an is are was were as by with from so since because when where then this
    total altogether exactly only overall respectively each here now
    """)
ANY_NOUNS = word_set("""
    way ways people person persons item items object objects thing things number numbers integer integers solution
    solutions value values possibility possibilities option options choice choices element elements piece pieces point
    points unit units arrangement arrangements
    """)
ORDINALS = word_set("st nd rd th")
MIXED_SCRIPT = re.compile(
    "[A-Za-z][^ ]*[\u0370-\u03ff\u0400-\u058f\u10a0-\u10ff\u13a0-\u13ff]"
    "|[\u0370-\u03ff\u0400-\u058f\u10a0-\u10ff\u13a0-\u13ff][^ ]*[A-Za-z]"
)
LENGTHS = word_set("nm um mm cm dm m km in ft yd mi unit")
CURRENCIES = word_set("cent dollar euro gbp yen rupee yuan won peso franc krona ruble real")
_UNIT_NAMES = {
    "nm": "nm nanometer nanometers nanometre nanometres",
    "um": "micrometer micrometers micrometre micrometres micron microns",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "dm": "dm decimeter decimeters decimetre decimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yds yard yards",
    "mi": "mi mile miles",
    "light-year": "light-year light-years lightyear lightyears",
    "unit": "unit units",
    "acre": "acre acres",
    "hectare": "hectare hectares",
    "l": "l L liter liters litre litres",
    "dl": "dL dl deciliter deciliters decilitre decilitres",
    "cl": "cL cl centiliter centiliters centilitre centilitres",
    "ml": "mL ml milliliter milliliters millilitre millilitres",
    "cc": "cc",
    "gal": "gal gallon gallons",
    "qt": "qt quart quarts",
    "pt": "pint pints",
    "cup": "cup cups",
    "tablespoon": "tbsp tablespoon tablespoons",
    "teaspoon": "tsp teaspoon teaspoons",
    "barrel": "barrel barrels",
    "ms": "ms msec millisecond milliseconds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "fortnight": "fortnight fortnights",
    "month": "month months",
    "year": "yr yrs year years",
    "decade": "decade decades",
    "century": "century centuries",
    "am": "am antemeridian",
    "pm": "postmeridian",
    "mph": "mph",
    "kph": "kph kmh kmph",
    "knot": "knot knots",
    "mg": "mg milligram milligrams",
    "g": "g gm gram grams",
    "kg": "kg kgs kilogram kilograms kilo kilos",
    "tonne": "tonne tonnes",
    "ton": "ton tons",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "stone": "stone stones",
    "cent": "cent cents penny pennies",
    "dollar": "dollar dollars usd buck bucks",
    "euro": "euro euros eur",
    "gbp": "gbp pound pounds",
    "yen": "yen jpy",
    "rupee": "rupee rupees inr",
    "yuan": "yuan rmb cny renminbi",
    "won": "won krw",
    "peso": "peso pesos",
    "franc": "franc francs chf",
    "krona": "krona kronor krone kroner sek nok dkk",
    "ruble": "ruble rubles rouble roubles rub",
    "real": "reais brl",
    "rad": "rad rads radian radians",
    "degree": "degree degrees deg",
    "gradian": "gradian gradians gon",
    "turn": "turn turns revolution revolutions rotation rotations",
    "arcminute": "arcminute arcminutes",
    "arcsecond": "arcsecond arcseconds",
    "celsius": "celsius centigrade",
    "fahrenheit": "fahrenheit",
    "kelvin": "K kelvin kelvins",
    "percent": "percent percentage",
    "ppm": "ppm",
    "basis point": "bps basis",
    "newton": "N newton newtons",
    "joule": "J joule joules",
    "kilojoule": "kJ kilojoule kilojoules",
    "calorie": "calorie calories",
    "kilocalorie": "kcal kilocalorie kilocalories",
    "watt": "W watt watts",
    "kilowatt": "kW kilowatt kilowatts",
    "megawatt": "megawatt megawatts",
    "watt-hour": "watt-hour watt-hours",
    "kilowatt-hour": "kWh kilowatt-hour kilowatt-hours",
    "volt": "V volt volts",
    "ampere": "amp amps ampere amperes",
    "ohm": "ohm ohms",
    "coulomb": "coulomb coulombs",
    "farad": "farad farads",
    "tesla": "tesla teslas",
    "hertz": "Hz hz hertz",
    "kilohertz": "kHz khz kilohertz",
    "megahertz": "MHz mhz megahertz",
    "gigahertz": "GHz ghz gigahertz",
    "pascal": "Pa pascal pascals",
    "kilopascal": "kPa kpa kilopascal kilopascals",
    "atmosphere": "atm atmosphere atmospheres",
    "mole": "mol mole moles",
    "bit": "bit bits",
    "byte": "byte bytes",
    "kilobyte": "kilobyte kilobytes",
    "megabyte": "megabyte megabytes",
    "gigabyte": "gigabyte gigabytes",
    "terabyte": "terabyte terabytes",
}
# What a word may mean: a pound is money or a weight.
UNITS = {
    word: tuple(name for name, words in _UNIT_NAMES.items() if word in words.split())
    for words in _UNIT_NAMES.values()
    for word in words.split()
}
# In these the case tells m, milli, from M, mega.
SI_PREFIXES = {"n": "nano", "m": "milli", "k": "kilo", "M": "mega", "G": "giga", "T": "tera"}
SI_SYMBOLS = {
    "m": "meter", "g": "gram", "s": "second", "l": "liter", "L": "liter", "W": "watt", "Wh": "watt-hour",
    "Hz": "hertz", "Pa": "pascal", "J": "joule", "V": "volt", "A": "ampere", "N": "newton", "mol": "mole", "B": "byte",
}  # fmt: skip
# Equal by definition.
DERIVED_UNITS = {
    "mph": (("mi", 1), ("h", -1)),
    "kph": (("km", 1), ("h", -1)),
    "cc": (("cm", 3),),
    "ml": (("cm", 3),),
    "l": (("dm", 3),),
}
SHORT_WORDS |= {word for word in UNITS if 2 <= len(word) <= 3 and word.islower()} - {"dm", "ms"}  # products too
# Signs vanish before a value is read; what they say of it does not.
CURRENCY = {
    sign: unit
    for signs, unit in {
        "\\$ \\textdollar": "dollar",
        "\u00a2 \\cent \\textcent": "cent",
        "\u00a3 \\pounds \\textsterling": "gbp",
        "\u20ac \\euro \\texteuro": "euro",
        "\u00a5 \\yen": "yen",
        "\u20b9": "rupee",
    }.items()
    for sign in signs.split()
}
UNIT_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
UNIT_LETTERS = frozenset("mgshLl")  # metres, grams, seconds, hours, litres
# After a number, and set as text: elsewhere they are names.
UNIT_CAPITALS = word_set("N J W V K MW GW TW MV MJ GJ MN ML MB GB TB")
SCALES = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}

SETS_IN_WORDS = {
    "all real numbers": "mathbb R",
    "all reals": "mathbb R",
    "set of all real numbers": "mathbb R",
    "empty set": "emptyset",
}

_ONES_IN_ORDER = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
    """
_ONES = {word: number for number, word in enumerate(_ONES_IN_ORDER.split())}
_TENS_IN_ORDER = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {word: 10 * (number + 2) for number, word in enumerate(_TENS_IN_ORDER.split())}


def number_in_words(words: list[str]) -> int | None:
    """`forty two` is 42, `one thousand two hundred` 1200; None when any word is no number."""
    total = current = 0
    seen = False
    for word in words:
        if word == "and" and seen:
            continue
        if word in _ONES:
            if seen and (current % 10 or (current % 100 == 10)):
                return None
            if seen and _ONES[word] > 9 and current % 100:
                return None
            current += _ONES[word]
        elif word in _TENS:
            if current % 100:
                return None
            current += _TENS[word]
        elif word == "hundred" and current:
            current *= 100
        elif word in ("thousand", "million", "billion") and current:
            total += current * SCALES[word]
            current = 0
        else:
            return None
        seen = True
    return total + current if seen else None


_PARTS_IN_ORDER = "half third fourth fifth sixth seventh eighth ninth tenth"
_PARTS = {word: number + 2 for number, word in enumerate(_PARTS_IN_ORDER.split())} | {"quarter": 4}


def fraction_in_words(words: list[str]) -> Fraction | None:
    """`one half`, `two thirds`; None for anything else. A `third` alone is a position."""
    if words in (["half"], ["a", "half"]):
        return Fraction(1, 2)
    if len(words) != 2 or words[0] not in _ONES or words[0] == "zero":
        return None
    part = {"halves": "half"}.get(words[1], words[1].removesuffix("s"))
    return Fraction(_ONES[words[0]], _PARTS[part]) if part in _PARTS else None
