"""Prompts of the tool's own: templates over topics, and passages put together from sentences of ours.

Varied rather than clever: what the draft has to learn is how the target writes about many things.
"""

from __future__ import annotations

import random

_TOPICS = [
    "the water cycle",
    "black holes",
    "photosynthesis",
    "the French Revolution",
    "machine learning",
    "climate change",
    "jazz",
    "the Roman Empire",
    "vaccines",
    "supply and demand",
    "plate tectonics",
    "Shakespeare",
    "the human heart",
    "electric cars",
    "coral reefs",
    "the stock market",
    "chess openings",
    "sourdough bread",
    "the moon landing",
    "renewable energy",
    "bees",
    "the Silk Road",
    "DNA",
    "time management",
    "public speaking",
    "meditation",
    "the Great Wall of China",
    "volcanoes",
    "artificial intelligence",
    "database indexes",
    "binary search",
    "recursion",
    "hash tables",
    "the Olympic Games",
    "coffee",
    "chocolate",
    "the immune system",
    "gravity",
    "sleep",
    "healthy eating",
    "running a marathon",
    "gardening",
    "photography",
    "learning a language",
    "the piano",
    "oil painting",
    "rainforests",
    "penguins",
    "dolphins",
    "space tourism",
    "nuclear power",
    "the printing press",
    "the industrial revolution",
    "inflation",
    "personal budgets",
    "remote work",
    "job interviews",
    "teamwork",
    "leadership",
    "social media",
    "privacy",
    "cybersecurity",
    "open source software",
    "Linux",
    "Python lists",
    "SQL joins",
    "unit tests",
    "version control",
    "web servers",
    "operating systems",
    "compilers",
    "neural networks",
    "probability",
    "prime numbers",
    "fractions",
    "the Pythagorean theorem",
    "derivatives",
    "statistics",
    "logic puzzles",
    "haiku",
    "short stories",
    "fairy tales",
    "detective novels",
    "science fiction",
    "travel in Japan",
    "Paris",
    "Egypt",
    "Brazil",
    "the Sahara",
    "mountain climbing",
    "sailing",
    "football",
    "tennis",
    "cycling",
    "yoga",
    "dogs",
    "cats",
    "horses",
    "elephants",
    "whales",
    "weather forecasts",
    "earthquakes",
    "recycling",
    "plastic in the ocean",
    "urban planning",
    "trains",
    "bridges",
    "aeroplanes",
    "robots",
    "3D printing",
    "smartphones",
    "video games",
    "board games",
    "birthday parties",
    "weddings",
    "friendship",
    "kindness",
    "honesty",
    "patience",
    "stress",
    "exercise",
    "vitamins",
    "allergies",
    "first aid",
    "school uniforms",
    "homework",
    "libraries",
    "museums",
    "theatre",
    "opera",
    "film music",
    "cooking rice",
    "pasta",
    "salads",
    "soup",
    "tea",
    "honey",
    "cheese",
    "apples",
    "the seasons",
]

_TEMPLATES = [
    "What is {t}?",
    "Explain {t} to a child.",
    "Explain {t} in simple terms.",
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "Write a blog post about {t}.",
    "Give me five facts about {t}.",
    "List ten ideas related to {t}.",
    "What are the advantages and disadvantages of {t}?",
    "How has {t} changed over time?",
    "Why is {t} important?",
    "Write an email to a friend about {t}.",
    "Write a dialogue between two people about {t}.",
    "Create a quiz with three questions about {t}.",
    "Give me a step-by-step guide to getting started with {t}.",
    "Compare {t} and {u}.",
    "How are {t} and {u} related?",
    "Write a persuasive paragraph about {t}.",
    "What are common myths about {t}?",
    "Describe {t} in one sentence.",
    "Summarize what is known about {t}.",
    "Write a headline about {t}.",
    "What would the world be like without {t}?",
    "Write a speech about {t} for a school assembly.",
    "Pretend to be an expert in {t}. What would you teach first?",
    "Who should learn about {t}, and why?",
    "Write a product review that mentions {t}.",
    "Make a table with facts about {t} and {u}.",
    "Draft an outline for an essay about {t}.",
    "What questions do people ask about {t}?",
    "Imagine you are a news reporter. Report on {t}.",
    "Write three tweets about {t}.",
    "Write a letter to the editor about {t}.",
    "Give an example that illustrates {t}.",
    "Tell me a joke about {t}.",
    "Write a Python function that has to do with {t}.",
    "Use the words {t} and {u} in one paragraph.",
    "What is the history of {t}?",
    "Tell me more about {t} and {u}.",
]

_SUBJECTS = [
    "the old lighthouse keeper",
    "a young engineer",
    "the village school",
    "our research team",
    "the city council",
    "a travelling musician",
    "the small bakery",
    "the national park",
    "a retired doctor",
    "the new library",
    "an airline company",
    "the farmers",
    "a group of students",
    "the museum",
    "the fishing boat",
    "my grandmother",
    "the football club",
    "a local artist",
    "the hospital",
    "the train station",
]
_VERBS = [
    "opened a new chapter last spring",
    "had to close for two weeks",
    "found an unexpected solution",
    "asked the neighbours for help",
    "won a prize for its work",
    "lost most of its savings",
    "moved to the coast",
    "planted two hundred trees",
    "decided to start again",
    "published a report about the river",
    "repaired the broken bridge",
    "welcomed forty guests",
    "wrote a letter to the mayor",
    "learned how to save energy",
    "built a wooden stage",
]
_REASONS = [
    "because the winter had been long",
    "although nobody had expected it",
    "after a storm damaged the roof",
    "while prices kept rising",
    "in order to attract more visitors",
    "since the old rules no longer worked",
    "even though money was short",
    "when the snow finally melted",
    "so that children could learn for free",
    "despite many doubts",
]
_ENDINGS = [
    "Most people were pleased with the result.",
    "The plan will be reviewed next year.",
    "Experts say that more time is needed.",
    "A second attempt is planned for the autumn.",
    "Some critics called it too expensive.",
    "The story spread quickly through the region.",
    "In the end, everyone agreed to continue.",
    "Nobody knows what will happen next.",
]
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch")
_PASSAGE_TASKS = [
    "Summarize the following text in one sentence:\n\n{p}",
    "Summarize this passage:\n\n{p}",
    "{p}\n\nTL;DR:",
    "Translate the following text to {l}:\n\n{s}",
    "How do you say this in {l}? {s}",
    "Rewrite this text:\n\n{p}",
    "Read the text and write three questions about it.\n\n{p}",
    "Write a title for this text:\n\n{p}",
    "What is the main idea of this passage?\n\n{p}",
    "Continue the story: {p}",
    "Make this text shorter: {p}",
    "Correct the grammar of this sentence: {s}",
    "Is the tone of this text positive or negative?\n\n{p}",
    "{p}\n\nWhat happened, and why?",
    "List the people and places in this text:\n\n{p}",
]
_PEOPLE = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Leo")
_THINGS = (
    "apples",
    "pencils",
    "books",
    "tickets",
    "cookies",
    "marbles",
    "stamps",
    "eggs",
    "shirts",
    "plants",
)
_SUMS = [
    "{a} has {x} {o}. {b} has {y} times as many. How many {o} do they have together?",
    "{a} buys {x} {o} for ${y} each and pays with a ${z} bill. How much change is left?",
    "A box holds {x} {o}. {a} fills {y} boxes and gives {b} half of all. How many {o} does {b} get?",
    "{a} reads {x} pages a day for {y} days. {b} reads {z} pages in all. Who reads more, and by how much?",
    "{a} and {b} share {z} {o}. {a} gets {x} more than {b}. How many does each get?",
]


def own_prompts(count: int, *, seed: int) -> list[tuple[str, str]]:
    """`count` different pairs (source, prompt), the same for the same seed."""
    draw = random.Random(f"own {seed}")
    kinds = (("own/topic", _topic, 55), ("own/passage", _passage, 30), ("own/sums", _sum, 15))
    found: dict[str, str] = {}
    for _ in range(count * 20):
        if len(found) >= count:
            break
        source, make, _ = draw.choices(kinds, weights=[kind[2] for kind in kinds])[0]
        found.setdefault(make(draw), source)
    return [(source, prompt) for prompt, source in found.items()]


def _topic(draw: random.Random) -> str:
    topic, other = draw.sample(_TOPICS, 2)
    return draw.choice(_TEMPLATES).format(t=topic, u=other)


def _passage(draw: random.Random) -> str:
    sentences = [_sentence(draw) for _ in range(draw.randint(2, 5))]
    passage = " ".join([*sentences, draw.choice(_ENDINGS)])
    return draw.choice(_PASSAGE_TASKS).format(p=passage, s=sentences[0], l=draw.choice(_LANGUAGES))


def _sentence(draw: random.Random) -> str:
    text = f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_REASONS)}."
    return text[0].upper() + text[1:]


def _sum(draw: random.Random) -> str:
    first, second = draw.sample(_PEOPLE, 2)
    x, y = draw.randint(3, 24), draw.randint(2, 9)
    return draw.choice(_SUMS).format(
        a=first, b=second, o=draw.choice(_THINGS), x=x, y=y, z=draw.choice((50, 60, 80, 100, 120, 200))
    )
