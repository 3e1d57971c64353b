"""Records of the kind of countries: a person, a real landmark, and the country it stands in.

Owns the landmarks, names and sentences, all chosen for this project, and how a record is drawn
from them. What a record means is in `countries.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

#: By country, landmarks as they stand in a sentence.
LANDMARKS: dict[str, tuple[str, ...]] = {
    "Argentina": ("the Perito Moreno Glacier", "the Teatro Colón", "the Obelisco of Buenos Aires"),
    "Australia": ("the Sydney Opera House", "Uluru", "Bondi Beach", "the Twelve Apostles"),
    "Austria": ("Schönbrunn Palace", "Hohensalzburg Fortress", "Melk Abbey"),
    "Belgium": ("the Atomium", "the Manneken Pis", "the Belfry of Bruges"),
    "Bolivia": ("the Salar de Uyuni", "the ruins of Tiwanaku"),
    "Brazil": ("Christ the Redeemer", "Sugarloaf Mountain", "the Maracanã Stadium"),
    "Cambodia": ("Angkor Wat", "the Bayon Temple"),
    "Canada": ("the CN Tower", "the Château Frontenac", "Lake Louise", "Stanley Park"),
    "Chile": ("the moai of Easter Island", "Torres del Paine", "La Moneda Palace"),
    "China": ("the Forbidden City", "the Terracotta Army", "the Temple of Heaven", "the Bund"),
    "Colombia": ("the Gold Museum of Bogotá", "the Castillo San Felipe de Barajas"),
    "Croatia": ("the walls of Dubrovnik", "Diocletian's Palace", "the Plitvice Lakes"),
    "Cuba": ("the Malecón of Havana", "El Morro Castle"),
    "Czech Republic": ("Charles Bridge", "Prague Castle", "Karlštejn Castle"),
    "Denmark": ("the Little Mermaid statue", "Tivoli Gardens", "Kronborg Castle"),
    "Egypt": ("the Great Sphinx of Giza", "the Karnak Temple", "Abu Simbel"),
    "Ethiopia": ("the rock churches of Lalibela", "the obelisks of Aksum"),
    "Finland": ("Suomenlinna", "Temppeliaukio Church", "Helsinki Cathedral"),
    "France": ("the Eiffel Tower", "Mont-Saint-Michel", "the Louvre", "the Pont du Gard"),
    "Germany": ("the Brandenburg Gate", "Neuschwanstein Castle", "Cologne Cathedral"),
    "Greece": ("the Parthenon", "the Palace of Knossos", "the monasteries of Meteora"),
    "Hungary": ("Fisherman's Bastion", "the Széchenyi Chain Bridge"),
    "Iceland": ("Hallgrímskirkja", "the Gullfoss waterfall", "the Blue Lagoon"),
    "India": ("the Taj Mahal", "the Red Fort", "the Hawa Mahal", "the Qutub Minar"),
    "Indonesia": ("Borobudur", "the Prambanan temples", "Mount Bromo"),
    "Iran": ("Persepolis", "Naqsh-e Jahan Square", "the Azadi Tower"),
    "Ireland": ("the Cliffs of Moher", "the Rock of Cashel", "Blarney Castle"),
    "Italy": ("the Colosseum", "the Leaning Tower of Pisa", "the Trevi Fountain"),
    "Japan": ("Mount Fuji", "Himeji Castle", "the Fushimi Inari Shrine", "Tokyo Skytree"),
    "Jordan": ("the Treasury of Petra", "Wadi Rum", "the ruins of Jerash"),
    "Kenya": ("the Maasai Mara", "Fort Jesus", "Amboseli National Park"),
    "Malaysia": ("the Petronas Towers", "the Batu Caves"),
    "Mexico": ("Chichén Itzá", "the Pyramid of the Sun", "the Palacio de Bellas Artes"),
    "Morocco": ("Jemaa el-Fnaa", "the Hassan II Mosque", "Aït Benhaddou"),
    "Myanmar": ("the Shwedagon Pagoda", "the temples of Bagan"),
    "Nepal": ("the Boudhanath Stupa", "Swayambhunath"),
    "Netherlands": ("the Rijksmuseum", "the windmills of Kinderdijk", "Keukenhof"),
    "New Zealand": ("Milford Sound", "the Waitomo Caves", "the Auckland Sky Tower"),
    "Norway": ("the Geirangerfjord", "Nidaros Cathedral", "the Preikestolen cliff"),
    "Pakistan": ("the Badshahi Mosque", "Mohenjo-daro", "the Faisal Mosque"),
    "Peru": ("Machu Picchu", "the Nazca Lines", "the fortress of Sacsayhuamán"),
    "Philippines": ("the Chocolate Hills", "the Banaue Rice Terraces", "Fort Santiago"),
    "Poland": ("Wawel Castle", "the Wieliczka Salt Mine", "Malbork Castle"),
    "Portugal": ("Belém Tower", "Pena Palace", "the Dom Luís I Bridge"),
    "Romania": ("Bran Castle", "Peleș Castle"),
    "Russia": ("Red Square", "Saint Basil's Cathedral", "the Hermitage Museum"),
    "South Africa": ("Table Mountain", "Robben Island", "Kruger National Park"),
    "South Korea": ("Gyeongbokgung Palace", "Bulguksa Temple", "the N Seoul Tower"),
    "Spain": ("the Sagrada Família", "the Alhambra", "the Prado Museum", "the Aqueduct of Segovia"),
    "Sri Lanka": ("Sigiriya", "the Temple of the Tooth"),
    "Sweden": ("the Vasa Museum", "Drottningholm Palace", "the Turning Torso"),
    "Switzerland": ("the Matterhorn", "Chillon Castle", "the Chapel Bridge of Lucerne"),
    "Tanzania": ("Mount Kilimanjaro", "the Ngorongoro Crater"),
    "Thailand": ("Wat Arun", "the Grand Palace of Bangkok", "the ruins of Ayutthaya"),
    "Turkey": ("Hagia Sophia", "the Library of Celsus at Ephesus", "the Maiden's Tower"),
    "United Arab Emirates": ("the Burj Khalifa", "the Sheikh Zayed Grand Mosque"),
    "United Kingdom": ("Stonehenge", "the Tower of London", "Edinburgh Castle", "Hadrian's Wall"),
    "United States": ("the Statue of Liberty", "Mount Rushmore", "the Golden Gate Bridge"),
    "Vietnam": ("the Imperial City of Hue", "Ha Long Bay", "the Cu Chi tunnels"),
    "Zimbabwe": ("Hwange National Park", "Matobo National Park"),
}  # fmt: skip

PEOPLE = (
    "Amara", "Beatriz", "Callum", "Daria", "Emeka", "Farida", "Gustav", "Hanna", "Ilya", "Jelena",
    "Kofi", "Leila", "Mateo", "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Stellan", "Tamika",
    "Umberto", "Vera", "Wendell", "Ximena", "Yusuf", "Zofia",
)  # fmt: skip

SENTENCES = (
    "{person} is at {landmark}.",
    "{person} is standing near {landmark}.",
    "{person} is taking pictures of {landmark}.",
    "{person} is waiting for friends at {landmark}.",
)

QUESTION = "Which country is {person} in right now?"

_PLACES = tuple((place, country) for country, names in LANDMARKS.items() for place in names)

#: How many records differ from each other.
MOST = len(_PLACES) * len(PEOPLE) * len(SENTENCES)


def records(n: int, rng: Random) -> Iterator[dict[str, object]]:
    """n records, no two alike; every landmark is used once before any is used again."""
    people, sentences = len(PEOPLE), len(SENTENCES)
    # Per landmark the pairs of person and sentence in an order of their own.
    order = [rng.sample(range(people * sentences), people * sentences) for _ in _PLACES]
    places: list[int] = []
    for number in range(n):
        turn = number // len(_PLACES)
        if not places:
            places = rng.sample(range(len(_PLACES)), len(_PLACES))
        place = places.pop()
        landmark, country = _PLACES[place]
        which, how = divmod(order[place][turn], sentences)
        person = PEOPLE[which]
        yield {
            "person": person,
            "landmark": landmark.removeprefix("the "),
            "country": country,
            "prompt_A": SENTENCES[how].format(person=person, landmark=landmark),
            "prompt_B": QUESTION.format(person=person),
            "y": country,
        }
