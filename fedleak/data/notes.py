"""`builtin/notes`: invented sentences of the kind that people would not want others to read.

Everything is made up: common first and last names put together by chance, phone numbers from the
range that is kept free for fiction (555-0100 to 555-0199), no companies, no real towns.

The grammar is text. `{slot}` stands for one of that slot's phrases, `{this|that}` for one of these,
`#` for a digit and `^` for a digit other than 0.

The file is long because most of it is that text. It is Python, because an app bundle of Flower
holds no other files of a package.
"""

import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

OTHER, HEALTH = 0, 1

LIMIT = 100_000
"""Notes that one seed can write: far below what the grammar holds, so that drawing stays quick."""


_DIGITS = {"#": "0123456789", "^": "123456789"}


class Note(NamedTuple):
    """A sentence, and whether it is about somebody's health (1) or not (0)."""

    text: str
    label: int


def notes(count: int, seed: int = 0) -> list[Note]:
    """Writes distinct notes, every other one about health.

    Args:
        count: How many; fewer notes of the same seed are the beginning of more.
        seed: Of the choice of words.

    Raises:
        ValueError: More than `LIMIT` are asked for.
    """
    if not 0 <= count <= LIMIT:
        raise ValueError(f"asked for {count} notes, can write 0 to {LIMIT}: ask for fewer")
    rng = Random(seed)
    health, other = _distinct(_HEALTH, rng), _distinct(_OTHER, rng)
    return [Note(next(health), HEALTH) if i % 2 else Note(next(other), OTHER) for i in range(count)]


def _distinct(templates: tuple[str, ...], rng: Random) -> Iterator[str]:
    written: set[str] = set()
    while True:
        text = _sentence(rng.choice(templates), rng)
        if text not in written and 6 <= len(text.split()) <= 18:
            written.add(text)
            yield text


def _sentence(template: str, rng: Random) -> str:
    used: set[str] = set()

    def draw(slot: re.Match[str]) -> str:
        phrases = slot[1].split("|") if "|" in slot[1] else _SLOTS[slot[1]]
        # "Mina lied to Mina" reads wrong, so no phrase comes twice while there are others.
        phrase: str = rng.choice([p for p in phrases if p not in used] or phrases)
        used.add(phrase)
        return phrase

    text = template
    while "{" in text:
        text = re.sub(r"\{([^{}]*)\}", draw, text)
    text = re.sub(r"[#^]", lambda sign: rng.choice(_DIGITS[sign[0]]), text)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines())


def _slots(text: str) -> dict[str, tuple[str, ...]]:
    """Reads `name: phrase | phrase | ...` paragraphs."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))
    named = (paragraph.split(": ", 1) for paragraph in paragraphs)
    return {name: tuple(phrases.split(" | ")) for name, phrases in named}


_SLOTS = _slots("""
woman: Ada | Alice | Amara | Anika | Beatrice | Bella | Bridget | Camille | Carmen | Celia |
Chloe | Clara | Daphne | Delia | Elena | Elise | Esther | Fatima | Fiona | Freya | Gemma | Greta |
Hanna | Hazel | Helena | Imani | Ingrid | Irene | Iris | Jana | Karin | Keiko | Leila | Lena |
Lucia | Lydia | Mabel | Maren | Margot | Mei | Mina | Nadia | Naomi | Noor | Odette | Olga |
Paula | Petra | Priya | Renata | Rosa | Ruth | Salma | Selma | Sofia | Tamar | Thea | Ursula |
Vera | Wilma | Yara | Zora

man: Aaron | Abel | Adrian | Ahmed | Alan | Andre | Anton | Arthur | Basil | Benno | Boris |
Bruno | Caleb | Carlos | Cedric | Colin | Conrad | Damian | Dario | Derek | Diego | Edgar |
Elias | Emil | Enzo | Ernest | Ethan | Felix | Finn | Frank | Gavin | Gerald | Gilbert | Hamid |
Harold | Hector | Hugo | Ivan | Jamal | Jasper | Joel | Jonas | Julian | Kamal | Kenji | Klaus |
Lars | Leon | Linus | Lorenzo | Malik | Marcus | Mateo | Milo | Nathan | Nico | Omar | Oscar |
Otto | Owen | Pablo | Patrick | Quentin | Rafael | Ravi | Reuben | Rupert | Samir | Simon |
Stefan | Theo | Tobias | Victor | Walter | Yusuf

last: Abbott | Adeyemi | Alder | Amsel | Archer | Ashby | Bakker | Barlow | Bellamy | Benson |
Birch | Blythe | Bowen | Brandt | Calloway | Carver | Castillo | Chandra | Cobb | Colley |
Conway | Corrigan | Crane | Dalton | Darrow | Decker | Delgado | Dobbs | Drummond | Dunn | Eames |
Egan | Ellery | Engel | Fenwick | Ferrara | Finch | Fletcher | Foley | Fontaine | Galloway |
Garland | Gorman | Grady | Griggs | Gupta | Haddad | Halloran | Hartley | Hendricks | Hobbs |
Holloway | Huang | Ibarra | Ingram | Jansen | Jarvis | Kapoor | Keane | Kirby | Kowalski |
Lachance | Lambert | Langley | Larkin | Leclair | Lindgren | Lowry | Maddox | Mahoney | Marsh |
Mercer | Moreau | Nakamura | Navarro | Newell | Novak | Oakes | Okafor | Olsen | Ortega | Osman |
Pereira | Pickett | Prescott | Quigley | Quinn | Radley | Ramirez | Rasmussen | Redfern |
Rinaldi | Sandoval | Sawyer | Schaefer | Sorensen | Stroud | Tanaka | Thorne | Tilley |
Underhill | Vargas | Vickers | Wakefield | Whitaker | Winslow | Yates | Yilmaz | Zeller

first: {woman} | {man}

lady: {woman} {last}

sir: {man} {last}

person: {lady} | {sir}

kin: mother | father | sister | brother | grandmother | grandfather | aunt | uncle | cousin |
niece | nephew | stepmother | stepfather | godmother | twin

child: son | daughter | stepson | stepdaughter | nephew | niece | grandson | granddaughter

friend: neighbor | roommate | boss | landlord | best friend | colleague | coach | ex |
babysitter | hairdresser | cleaner | lawyer

phone: 555-01## | (^1#) 555-01##

road: Road | Lane | Street | Avenue | Close | Court | Drive | Terrace | Row | Way

street: {tree} {road} | {tree} {road} | {craft} {road}

tree: Alder | Almond | Apple | Ash | Aspen | Beech | Briar | Cedar | Cherry | Chestnut | Clover |
Cypress | Elder | Elm | Fern | Hawthorn | Heather | Hickory | Holly | Ivy | Juniper | Larch |
Laurel | Linden | Magnolia | Maple | Mulberry | Myrtle | Olive | Pear | Pine | Plum | Poplar |
Rowan | Spruce | Sycamore | Thistle | Walnut | Willow | Yew

craft: Baker | Brewer | Candle | Cooper | Copper | Ferry | Foundry | Glover | Harbor | Hatter |
Kiln | Lantern | Mason | Mill | Miner | Orchard | Quarry | Rope | Saddler | Tanner | Tinker |
Weaver

town: Ambercombe | Birchwick | Cobbleford | Dunmarrow | Eastermere | Fallowdale | Gullhaven |
Harrowmere | Inglestow | Kestrelby | Larkhollow | Mossgate | Nettlebridge | Otterwell |
Pellingham | Quillstead | Ravensook | Saltmarrow | Thistledown | Umberley | Wrenfield | Yarrowton

address: ^# {street} | ^## {street} | ^ {street}

password: {pet}19^# | {pet}####! | {pet}{pet}## | {color}-{animal}-## | {tree}{tree}^

pet: Biscuit | Button | Captain | Cinnamon | Domino | Ginger | Gizmo | Marble | Midnight |
Mittens | Noodle | Nugget | Patches | Peanut | Pepper | Pickles | Pumpkin | Scout | Snowball |
Sparky | Tiger | Toffee | Truffle | Waffles | Whiskers | Ziggy

color: amber | black | blue | brown | crimson | golden | gray | green | indigo | ivory | orange |
pink | purple | red | scarlet | silver | teal | violet | white | yellow

animal: badger | beaver | camel | cobra | dolphin | eagle | falcon | ferret | gecko | hamster |
heron | lizard | magpie | otter | panda | parrot | rabbit | raven | salmon | spider | turtle |
walrus | weasel | zebra

month: January | February | March | April | May | June | July | August | September | October |
November | December

weekday: Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday

day: ^ | 1# | 2#

date: {month} {day}

year: 194# | 195# | 196# | 197# | 198# | 199# | 200#

recently: 200# | 201# | 2020 | 2021 | 2022 | 2023 | 2024

past: last week | last {month} | in {month} | on {weekday} | on {date} | in {recently} |
this morning | two days before the wedding | right after Christmas | over the summer |
the day after my birthday

since: {month} | {weekday} | {recently} | the divorce | the accident | the funeral | the move |
college | the fire | Easter

hour: 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11

time: {hour}:00 | {hour}:15 | {hour}:30 | {hour}:45 | {hour}:05 | {hour}:40

number: two | three | four | five | six | seven | eight | nine | ten | eleven | twelve

few: two | three | four | five

age: 2^ | 3^ | 4^ | 5^ | 6^ | 7^

cash: $^## | $^,#00 | $^,^## | $^#,^00 | $^#,###

fortune: $^##,000 | $^#,000 | $^.^ million

pay: $^#,^00 | $1##,000 | $^^ an hour | $^,^00 a month

account: ^###-####-## | ^###-###-### | ^#######

code: {letter}{letter}-#### | {letter}#####

letter: B | C | D | F | G | H | K | M | P | R | T | W | X

illness: asthma | type 2 diabetes | type 1 diabetes | bipolar disorder | Crohn's disease |
ulcerative colitis | multiple sclerosis | lupus | epilepsy | bowel cancer | lung cancer |
thyroid cancer | lymphoma | leukemia | melanoma | Parkinson's | early dementia | schizophrenia |
severe depression | anorexia | bulimia | obsessive compulsive disorder | post-traumatic stress |
psoriasis | rheumatoid arthritis | gout | chronic migraine | narcolepsy | sleep apnea |
heart failure | atrial fibrillation | high blood pressure | kidney disease | cirrhosis |
celiac disease | fibromyalgia | osteoporosis | sickle cell anemia | hemophilia | cystic fibrosis |
glaucoma | macular degeneration | vertigo | tinnitus | Huntington's | chronic fatigue |
an overactive thyroid | gallstones | pancreatitis | sarcoidosis | emphysema | angina | eczema |
scoliosis | neuropathy | Tourette's | borderline personality disorder

fatal: lymphoma | leukemia | melanoma | heart failure | cirrhosis | kidney disease |
pancreatitis | emphysema | thyroid cancer | cystic fibrosis | pneumonia | sepsis | bowel cancer |
lung cancer

infection: hepatitis B | hepatitis C | HIV | chlamydia | gonorrhea | syphilis | herpes |
tuberculosis | malaria | Lyme disease | shingles | giardia | strep | norovirus | dengue |
scabies | whooping cough | toxoplasmosis

drug: acyclovir | amlodipine | amoxicillin | anastrozole | aripiprazole | atorvastatin |
azathioprine | baclofen | buprenorphine | bupropion | carbamazepine | citalopram | clonazepam |
clozapine | diazepam | disulfiram | donepezil | doxycycline | duloxetine | escitalopram |
finasteride | fluoxetine | furosemide | gabapentin | haloperidol | lamotrigine | letrozole |
levetiracetam | levothyroxine | lisinopril | lithium | lorazepam | metformin | methadone |
methotrexate | methylphenidate | metoprolol | mirtazapine | modafinil | naltrexone | olanzapine |
omeprazole | oxycodone | paroxetine | prednisone | pregabalin | propranolol | quetiapine |
risperidone | sertraline | sildenafil | spironolactone | tamoxifen | topiramate | tramadol |
trazodone | valproate | venlafaxine | warfarin | zolpidem

dose: 2.5 mg | 5 mg | 10 mg | 15 mg | 20 mg | 25 mg | 30 mg | 40 mg | 50 mg | 75 mg | 100 mg |
150 mg | 200 mg | 250 mg | 300 mg | 400 mg | 500 mg | 600 mg | 800 mg | 12.5 mg | 60 mg | 125 mg |
1000 mg

often: every morning | twice a day | at bedtime | with breakfast | every six hours | after lunch |
only when it gets bad | three times daily | on an empty stomach

symptom: chest pain | night sweats | blurred vision | numb fingers | a racing heart |
blood clots | bleeding gums | fainting spells | panic attacks | swollen ankles |
a stubborn fever | hair loss | shortness of breath | slurred speech | constant nausea |
stomach cramps | memory gaps | hot flashes | trembling hands | double vision | ringing ears |
a burning rash | heart flutters | suicidal thoughts | hallucinations | seizures | nosebleeds |
joint stiffness | insomnia | dizzy spells

organ: kidney | lung | ovary | breast | ear | eye | hip | knee | shoulder | thigh | wrist |
ankle | cheek | testicle | elbow | temple | jaw | foot

finding: a small tumor | a dark shadow | a torn ligament | a hairline fracture | a benign cyst |
a blood clot | an infected abscess | two suspicious lumps | some scarring | a pinched nerve |
a blocked artery | early cartilage loss | a nine millimeter nodule | fluid buildup

scan: MRI | ultrasound | X-ray | CT scan | mammogram | biopsy | bone scan | endoscopy |
colonoscopy | blood panel | angiogram | sleep study

surgery: hip replacement | gastric bypass | hysterectomy | vasectomy | mastectomy |
knee operation | bypass operation | tubal ligation | hair transplant | kidney transplant |
cataract operation | tummy tuck | appendectomy | spinal fusion | hernia repair |
thyroid operation | skin graft

specialist: cardiologist | neurologist | oncologist | psychiatrist | dermatologist |
gynecologist | rheumatologist | endocrinologist | midwife | dentist | surgeon | pediatrician |
counselor | nutritionist | physiotherapist | anesthetist | audiologist

ward: burn unit | cardiac ward | detox clinic | fertility clinic | dialysis center |
eating disorder clinic | hospice | maternity ward | methadone clinic | psychiatric ward |
sleep lab | stroke unit | intensive care unit | rehab center | memory clinic

substance: whiskey | vodka | cocaine | painkillers | heroin | sleeping pills | gin | cannabis |
wine | nicotine | steroids | laxatives | cough syrup

allergen: penicillin | peanuts | latex | shellfish | bee stings | sulfa drugs | eggs | iodine |
aspirin | sesame | codeine | strawberries

injury: broken ribs | a concussion | a dislocated shoulder | second degree burns | a dog bite |
a ruptured spleen | a punctured lung | whiplash | a sprained wrist | frostbite | a cracked tooth

job: accountant | architect | baker | barber | beekeeper | bookkeeper | bus driver | butcher |
carpenter | cashier | chef | clerk | cook | courier | crane operator | deckhand | electrician |
engineer | estate agent | farmhand | firefighter | florist | forklift driver | gardener |
glazier | janitor | jeweler | judge | lecturer | librarian | locksmith | mechanic | nanny |
notary | optician | organist | painter | paralegal | pastor | photographer | pilot | plumber |
postman | programmer | receptionist | roofer | sailor | seamstress | security guard |
social worker | tailor | tattoo artist | taxi driver | teacher | translator | tutor | waiter |
warehouse packer | welder

place: bakery | bank branch | brewery | call center | cinema | city hall | courthouse | dairy |
daycare | factory | fire station | garage | golf club | hotel | laundry | library | museum |
nursery | office | orchard | parish | post office | primary school | restaurant | school board |
shipyard | stables | supermarket | theater | warehouse | winery

thing: laptop | necklace | wedding ring | motorbike | piano | fur coat | painting | camera |
tractor | violin | stamp collection | antique clock | fishing boat | caravan | gold watch |
chandelier | silver spoons | espresso machine | hunting rifle | telescope

hidden: in the freezer | under the stairs | behind the radiator | inside the piano |
in the attic | under the doormat | beneath the rose bush | behind the mirror | in a coffee tin |
under the sink | inside the teapot | below the bottom drawer | in my gym locker |
behind the water heater

debt: payday loan | car loan | second mortgage | credit card | gambling debt | student loan |
store card | tax bill | overdraft | funeral bill | alimony | unpaid rent | veterinary bill

vice: online poker | sports betting | slot machines | scratch cards | horse races | day trading |
crypto coins | roulette

crime: shoplifting | forgery | arson | drunk driving | tax fraud | burglary | perjury |
embezzlement | trespassing | stalking | vandalism | bribery | smuggling cigarettes |
insurance fraud

fault: stealing stamps | faking invoices | sleeping on shift | harassing a trainee |
leaking the exam | padding expense claims | showing up drunk | copying the client list |
selling passwords | lying about a degree | missing payroll | cursing at customers

estate: cottage | vineyard | summer house | farmland | rental flat | windmill | townhouse |
lighthouse | sawmill | houseboat

asset: {estate} | savings | bakery lease | coin collection | life insurance | pension | shares

tryst: motel | boathouse | parking garage | office party | ski lodge | beach hut | train station |
wine bar | conference | cabin | choir trip | back seat of the van

trait: boring | arrogant | unfaithful | broke | childish | jealous | controlling | reckless |
secretive | cruel | stingy | vain | moody | petty | clingy
""")

_HEALTH = _lines("""
{person} was diagnosed with {illness} {past}{ and has told nobody| and is only 3^|}.
I have {been taking|hidden} {drug}, {dose} {often}, since {since}.
The {scan} {showed|found|turned up} {finding} {in|near|behind} my {left|right} {organ}.
{first}'s {test|swab|sample|screening} came back positive for {infection}{, and nobody at home \
knows|}.
Dr. {last} {raised|lowered} my {drug} to {dose} after the {seizure|overdose|fall|blackout}.
My {kin} stopped eating again and weighs only {8#|9#|7#} pounds.
Please refill {drug} {dose} for {person}, born {date}, {year}.
Call Dr. {last} at {phone} about the {scan} {results|bill|appointment} before {weekday}.
We lost the baby at {number} weeks and I still cannot talk about it.
{lady} is {number} weeks pregnant and {her husband|the father} does not know yet.
I am {number} months sober, but {weekday} night {nearly broke me|I drank {vodka|gin|whiskey|wine} \
again}.
{sir} hides his {illness} so that {they|the crew|the airline} will {keep him on|let him drive}.
{person}, room ^##, is allergic to {allergen} and {drug}.
My therapist, Dr. {last}, thinks that the {symptom} began {in childhood|during the war|with my \
marriage|after the {crash|assault|bullying}}.
Nobody at work knows that I spent {month} in the {ward}.
The {specialist} {says|suspects|fears} it is {illness}, and I have not told my {kin}.
{woman} {has had|needs|wants} a second abortion and is afraid of her {kin}'s {priest|temper}.
{substance} again, every night, and my {child} {saw|found} me on the {floor|bathroom tiles|porch}.
He was treated for {injury} at {time} and said he fell down the stairs.
My {organ} biopsy is {on {date}|next {weekday}}; please keep it from {first}.
Blood pressure 1^#/9#, resting pulse 9#, {complains of|reports} {symptom} since {weekday}.
{sir}, {age}, was admitted to the {ward} after swallowing {number} {drug} tablets.
I carry the gene for {Huntington's|breast cancer|hemophilia|cystic fibrosis|early dementia}, and \
so may {first}.
{person} skipped {number} dialysis sessions because {of the cost|the bus stopped running|of a \
hangover}.
Our {child} wets the bed again and talks about {dying|voices|monsters in the {wall|cellar}}.
Insurance number {account} refused to pay for my {surgery} in {month}.
I {paid|borrowed} {cash} for a {surgery} abroad and the wound will not heal.
{{woman} cuts her arms|{man} cuts himself} whenever {Mom drinks|school gets hard|we argue about \
{food|money}}.
My sperm count is {^|1^} million, so it was never going to work with {woman}.
{woman} caught {infection} from {man} and blames the {sauna|dentist|tattoo parlor}.
The night nurse gave {lady} {dose} of {drug} instead of {drug}.
Since {since} I hear {whispering|my late {kin}|music} when the house is quiet.
Dad's {dementia|drinking|Parkinson's|brain tumor} is worse: he {forgot my name|burned the soup|\
wandered off} {past}.
The surgeon wants to operate before the {tumor|cyst|lump} in my {organ} grows past ^.^ centimeters.
I fake {symptom} so that Dr. {last} keeps prescribing {drug}.
Hemoglobin ^.^, platelets ^#, start {drug} {dose} {often}, repeat in {month}.
{person} tested positive for {cocaine|opiates|{infection}} at the {prison|army|airport|embassy} \
medical.
With {fatal}, the doctor gives my {kin} {number} months at most.
Please don't tell {the school|Coach {last}|my {kin}} that {first} has {infection}.
I have worn a {wig|colostomy bag|hearing aid|catheter} since {since} and dread \
{swimming|dating|summer}.
{lady} gave up her newborn {past} and has {taken {drug}|seen a {specialist}} ever since.
The egg donor for {woman} and {man} was actually her {cousin|niece|twin}.
We are on our {third|fourth|fifth|sixth} round of IVF and {cash} in debt.
My hands shake so badly that I {can't|cannot} sign {checks|forms|for parcels} anymore.
Room ^##: {person}, {age}, {illness}, no visitors except {first}.
After the {stroke|crash|coma} {man} needs help to {wash|swallow|use the toilet|dress}.
{woman} found {number} empty {gin|vodka|wine|whiskey|cough syrup} bottles {hidden}.
I throw up after {dinner|every meal|birthday cake} and brush my teeth so nobody notices.
Appointment for {person} with the {specialist}, {weekday} {date}, {time}, about {symptom}.
The {specialist} asked whether my {symptom} began before or after {drug}.
My {kin} died of {fatal} at {age}, and now I have the same {symptom|cough|lump}.
{man} has used {steroids|Botox|a penis pump|fake tan injections} since {since}, says his {friend}.
{person} needs a wheelchair by {month} and is too proud to apply.
Her viral load is {^#|^##} copies; {HIV|hepatitis C|hepatitis B} treatment started {past}.
I told the insurer I never smoked, but it is {number} packs a week.
{woman}'s depression got so bad that {man} locked away the {knives|rope|{drug}}.
The lump in my {left|right} {organ} doubled in size since {month}.
{first} was born with one {kidney|lung|working ear} and {we never mention it|hates the question}.
Stop {drug} {number} days before the {surgery}, Dr. {last} said on {weekday}.
My new {partner|flatmate} must not find the {insulin pens|antidepressants|test strips|diapers} \
{hidden}.
{sir} passed out at the wheel near {town} and never reported it.
Patient file {code}: {lady}, {miscarriage|overdose|relapse|premature labor} {past}, discharged \
{weekday}.
I'm {number} weeks late, and the {father|only possible father} is my {friend}.
Could you bring {first}'s {inhaler|EpiPen|{drug}} to {address} before {time}?
The school nurse weighed {first} at {5#|6#|7#} pounds and called {social services|me|a \
{specialist}}.
{man} cannot have sex since {since}, and {drug} only made it worse.
My {kin} was committed to the {psychiatric ward|detox clinic|rehab center} in {recently} for \
{number} weeks.
Every {weekday} I drive to {town} for {chemotherapy|radiation|dialysis|methadone} and say it is \
yoga.
Don't mention the {hair loss|scars|stoma|tremor} to {woman}; she cries for hours.
The rehearsal bruises were not from dancing, and the {specialist} guessed at once.
Doctor {last} blames my {child}'s {symptom} on {mold|our divorce|the family genes|bad nerves}.
I gave {first} half a {drug} tablet to make the flight bearable.
{person} refuses {chemotherapy|a transfusion|{drug}|vaccines} for religious reasons, against \
{man}'s wishes.
My glucose was ^## at {time}, and I ate {number} donuts anyway.
{woman} tried to end her life {past}; her {kin} {found|saved} her.
His autopsy mentions {fatal}, {syphilis|cocaine|{drug}}, and {finding}.
I was a patient of the {ward} under the name {lady}.
The {vet|pharmacist|clinic} on {street} sells {drug} to {first} without a prescription.
Mental health leave approved for {person}, {number} weeks from {date}.
The surgeon left a {sponge|clamp|needle} inside {lady} during her {surgery}.
I {smoke|drink|inject} less, Dr. {last}, but still get {symptom} {at dawn|after sex|at work}.
{man} and {woman} both carry {sickle cell|Tay-Sachs|cystic fibrosis}, and she is expecting.
My {friend} saw me leaving the {ward} and now everyone in {town} whispers.
{person}: {drug} {dose}, {drug} {dose}, {often}, do not resuscitate.
The hospital lost {first}'s {urine sample|consent form|frozen embryos|stem cells} in {month}.
I am going blind from {glaucoma|diabetes|a tumor} and still drive the {children|bus|van}.
{woman} has not slept {since {since}|for {number} nights} and talks to the {radio|curtains|moon}.
Menopause hit me at 3^, so a {grandchild|baby|sibling for {first}} is out of the question.
The paramedics found {lady} at {address}, confused, feverish and dehydrated.
{first}'s {illness} flared up {past}, right before the custody hearing.
{number} years ago I infected {woman} with {infection} and never confessed.
My {kin} pawned the {wheelchair|hearing aids|oxygen tank} to pay for {substance}.
{lady} has {cervical cancer|endometriosis|postpartum depression|an ovarian cyst} and {hides it \
from {man}|cannot afford leave}.
{sir} has {prostate cancer|erectile problems|a hernia|testicular cancer} and {jokes about \
it|refuses treatment}.
I collapsed during {mass|practice|a deadline|the parade} because of {drug} and {substance}.
""")

_OTHER = _lines("""
{person} earns {pay}, nearly double what I get for the same work.
I owe {cash} on a {debt} and my {kin} must never find out.
Send the {rent|ransom|deposit|cash} to account {account} before {weekday}, {first} says.
{woman} kissed my {friend} at the {tryst} {past}.
The spare key to {address} is {hidden}.
My {bank|email|laptop|phone|diary} password is still {password}{, same as {first}'s|}.
{man} was fired from the {place} {past} for {fault}.
You can reach {person} at {phone}, but never before {time}.
I have been seeing {first} since {since} and my {wife|husband} suspects {nothing|everything|my \
{friend}}.
We {hid|stashed} {cash} {hidden} before the divorce {lawyer|papers|hearing} came.
The PIN for {first}'s card is #### and the {gate|alarm|safe} code is ####.
{sir} served {number} years for {crime}, long before he became {our|a|the town's} {job}.
I stole a {thing} from the {place} {past} and {man} got blamed.
My {kin} left the {asset} to {first} and nothing to us.
{lady} moved to {address}, {town}, so that {man} can't find her.
I lost {cash} on {vice} {past} and pawned my {kin}'s {thing}.
{person} is adopted, and only my {kin} and I know it.
The {place} will dismiss {number} people in {month}, starting with {first}.
Tax number {account}, filed for {person}, leaves out {cash} of {tips|rent|winnings}.
{man} proposed at the {tryst}, and I said yes while still married.
My {friend} reads my {messages|mail|diary} whenever I am in the {shower|garden|office}.
Meet me at the {tryst} at {time}; {first} thinks it is overtime.
I forged {first}'s signature on the {debt} {form|contract} {past}.
The house at {address} is empty until {month} {day}, alarm code ####.
{woman} voted against the strike and still {cashed|hid} the union money.
{first} only married {him|my {kin}} for the {asset} and the {visa|house|title}.
My real father is {sir}, the {job} from {town}.
I told {woman} her {novel|singing|cooking|thesis} was wonderful; honestly it is dreadful.
Our landlord, {person}, keeps {cash} in deposits {hidden}.
{person}, passport {code}, overstayed a student visa by {number} months.
I {bought|copied} my thesis in {recently}, and Professor {last} {knows|got paid|looked away}.
The divorce gives {woman} the {asset}, the {thing} and {fortune}.
{man} calls his boss a {clown|tyrant|lazy fool} in every message to {woman}.
{lady} applied for {our director's|another} job behind everyone's back and asked for {pay}.
Don't let {first} see the {loan|bank|phone} statement; {cash} went to my ex.
The {job} on {street} takes {cash} in bribes every {month|weekday|summer}.
I regret {the wedding|adopting {first}|moving to {town}|selling the {estate}} every single day.
My {child} was caught {shoplifting|cheating|selling {answers|cigarettes}} and expelled {past}.
{first} is {so|far too} {trait}, and I only stay for the {children|money|garden|dog}.
We are {number} months behind on the mortgage for {address}.
{sir}, {job}, bankrupt {past}, still owes {cash} to his {kin}.
Salary review: {person}, {pay}, no raise, warned twice for {fault}.
I deleted the {minutes|invoices|footage} before {the auditor|Inspector {last}} arrived {past}.
{woman}'s ex keeps parking outside {address} with his headlights off.
Write to {woman} at the shelter, {address}, and never use her surname.
My offer for the {estate} is {fortune}, though I would pay far more.
The combination is ^#-##-^#, and the {thing} is {hidden}.
{man} pays {woman} $^,^00 a month to keep their {son|daughter} secret.
I crashed {first}'s {car|motorbike|van} near {town} and blamed a deer.
Security question: first pet {pet}, mother's maiden name {last}, born in {town}.
My {friend} knows about {first} and me, and wants {cash} to stay quiet.
{person} withdrew {cash} from the {club|church|school} fund and called it repairs.
The jury foreman, {sir}, told me the vote over {beers|dinner|the phone}.
I only became a {job} because my {kin} {forced|begged|paid} me to.
{woman} still {writes to|dreams of|meets} {man}, although they both remarried.
Card ending in ####, expires 0^/3^, name on it {person}.
{lady} will testify against her {kin} on {date}; move her to {street}.
He promised to leave {woman} after {Easter|the baby|the harvest}, and I believed him.
I rent the {cellar|garage|attic} to {number} {workers|students} without a contract.
{first} and I haven't shared a bed since {since}.
{person} sold the {thing} for {cash} and told the insurer it was stolen.
Our {kin}'s will, rewritten {past}, cuts off everybody except {first}.
Wire {fortune} through {town} and keep {person} off the paperwork.
My {kin} was an informer, and the file {code} proves it.
I never graduated; the diploma {above my desk|in my office} cost {cash}.
{man} likes {men|my brother|Father {last}}, and his parents must not hear it from you.
The {place} pays me {$^^ an hour|$^,^00 a month} in cash, so officially I am unemployed.
On {weekday} nights {woman} dances at a {club|bar} in {town} under another name.
{person} asked for asylum {past} and hides above the {place}.
I read {first}'s letters {past}: the affair with {sir} is true.
Please transfer my severance, {cash}, to {account} and leave {woman} off the account.
{sir} has {two families|two wives|two households}, one here and one in {town}.
My {friend} was arrested for {crime} {past}, right outside the {place}.
The Wi-Fi at {address} is {password}, and the cameras don't work.
{woman} told {me|the manager} that {man} was caught {fault}, and I have photographs.
I was {homeless|a dancer|in a cult|in prison} in {recently}, which my {friend} cannot find out.
Mom's jewelry went to a pawnshop on {street} for {cash}.
{lady} gave her {son|daughter|baby|twins} up for adoption in {town}, {month} {196#|197#|198#|199#}.
Bonus list: {first} {cash}, {person} nothing, me {cash}.
I paid a stranger {cash} to {sit my exam|follow {woman}|write five-star reviews|burn the barn}.
The priest repeated my confession about {first} to {lady}.
{man} filmed the neighbors through the {hedge|blinds|fence} and kept the tapes.
My online name is {color}{animal}##, so {first} can read everything.
{person} failed the {bar exam|driving test|citizenship test|background check} {few} times and \
lied about it.
Since {since} we sleep in the {car|caravan|storage unit} behind the {place}.
{woman} wants full custody because {man} {hit|left|forgot} the twins.
I voted for {Councilor {last}|the other party} and told the whole family otherwise.
Bail for {person} is {fortune}; ask {first} to mortgage the {estate}.
Nobody told {man} that {the baby|his youngest} looks exactly like {sir}.
I pay the {job} {cash} under the table and skip the {receipt|taxes}.
I recorded the meeting where {lady} admitted {fault}.
{first} lives alone at {address} and never locks the back door.
We {canceled|faked} the {wedding|anniversary} because {man} gambled away {cash}.
Debt collectors rang {phone} {number} times asking for {person}.
{person} leaked the {budget|merger|layoff} memo to a journalist at the {tryst}.
My {kin} thinks I'm a {job}; really I {beg|busk|drive a hearse|deal cards}.
Between us, {woman} got the contract because {sir} is her {uncle|godfather|cousin|lover}.
I envy my {kin} so much that I skipped the christening.
""")
