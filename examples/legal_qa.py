"""Questions about a contract, asked one after the other over the same history, with answers of a fixed form. Start a server first:

    tierax serve demo                              (or: make serve)
    python examples/legal_qa.py [http://127.0.0.1:30000]

Every call sends the contract again. The second one finds it in the cache, and its first token comes at once.
"""

from __future__ import annotations

import sys

from tierax import Runtime, assistant, gen, set_default_backend, user

# A pattern with `.*?` would let a small model ramble on until it is cut off: everything matches that but the end.
PATTERN = r'\{"answer": "[^"\n]{1,200}", "confidence": [0-9]{1,2}\}'
CLAUSES = [
    "The landlord lets to the tenant the flat on the second floor of 14 Mill Lane, with three rooms, kitchen, bath, hall, "
    "balcony and cellar compartment number 7, to live in. Other uses need the landlord's consent in writing.",
    "The tenancy begins on the first of May and runs for an indefinite time. For the first twelve months neither side may "
    "end it, save for good cause.",
    "The rent is 940 euros a month. It is due in advance, on the third working day of each month at the latest, and is paid "
    "into the landlord's account. What counts is when the money arrives.",
    "Beside the rent the tenant pays 180 euros a month towards running costs: heating, water, sewage, refuse, lift, cleaning "
    "of the stairs, insurance of the house and land tax. The landlord accounts for them by the end of the following year. A "
    "difference is settled within a month after the account was received.",
    "The tenant hands over a deposit of three months' rent without running costs, in three equal parts, the first when the "
    "tenancy begins. The landlord keeps it apart from his own means, at the usual rate of interest, which belongs to the tenant. "
    "It is returned six months after the flat was, as far as no claims are open.",
    "The rent may be raised once in fifteen months, to the local level at most, and by no more than fifteen per cent in three "
    "years. A rise is announced in writing with its reasons, and is owed from the third month after that.",
    "The landlord keeps the flat in the state that this contract presupposes. Defects are reported without delay. If one is "
    "not put right within a reasonable time, the rent is reduced by as much as the use of the flat is.",
    "Small repairs of what the tenant touches every day, such as taps, switches, handles and locks, are at the tenant's cost up "
    "to 90 euros each, and no more than 300 euros in a year.",
    "On moving out the tenant paints walls and ceilings if their state calls for it, in light and neutral colours. Fixed "
    "intervals are not agreed.",
    "Changes to the building, to pipes, wires or floors, need the landlord's consent in writing. What the tenant has put in "
    "may be taken out again, if the former state is restored.",
    "Small animals in cages and aquariums may be kept. Dogs and cats need the landlord's consent, which may be refused only for "
    "a reason that lies in the animal or in the other tenants. Consent once given may be taken back for such a reason.",
    "The flat may not be sublet as a whole. A room may be, if the tenant has a sound interest that arose after this contract, and "
    "the person is acceptable. Paid guests for less than a week at a time are not allowed in any case.",
    "Quiet is kept from ten in the evening until six in the morning, and from one to three in the afternoon. Instruments may be "
    "played for two hours a day outside these times.",
    "The tenant sweeps the pavement and clears it of snow in every fourth week, by a list that hangs in the hall. Snow is "
    "cleared by seven in the morning on working days, and by nine on Sundays.",
    "The laundry room may be used on the days that the list in the cellar says, from seven in the morning until nine in the "
    "evening. Washing machines may stand in bathrooms if they have a stop valve.",
    "Bicycles stand in the yard or in the cellar. Nothing is left in the stairs or in the hall, since these are ways of escape. "
    "Barbecues with charcoal are not allowed on balconies.",
    "The landlord may enter the flat after notice of at least three days, for a reason that is named, between nine and seven on a "
    "working day. Danger needs no notice. Would-be buyers or tenants may be shown round once a week.",
    "Notice is given in writing. The tenant's period is three months to the end of a month, whatever the length of the tenancy. "
    "The landlord's is three months, six after five years and nine after eight, and needs a legitimate interest, such as a need "
    "of the flat for himself or his family.",
    "If the rent of two months in a row is not paid, the landlord may end the tenancy without a period. Payment of all arrears within "
    "two months after a claim was served makes this void, once in two years.",
    "All keys are returned on the last day, copies included: two for the house, three for the flat, one for the letter box and one "
    "for the cellar. The state of the flat and of the meters is written down and signed by both.",
    "Several tenants owe everything jointly, and each may receive statements for all. A tenant who moves out stays bound until "
    "the landlord has released him in writing.",
    "The tenant insures the household goods, and tells the landlord of every water pipe that drips. Rooms are aired twice a day, "
    "and heated in winter so far that no pipe freezes, also while nobody is at home.",
    "The balcony may hold plants in pots and boxes that hang on the inner side. Awnings, aerials and satellite dishes need the "
    "landlord's consent, which is given if there is no other way of reception.",
    "Electric cars may be charged at the posts in the yard, for which the tenant makes a contract of his own with the operator. "
    "The landlord allows a charging point at the tenant's own cost if the house's supply bears it.",
    "The lift may not be used by children under six on their own, nor for loads above 300 kilograms. Faults are reported to "
    "the number that hangs beside the door on the ground floor.",
    "Lost keys are reported at once. If misuse cannot be ruled out, the landlord may have the lock and all keys that belong to it "
    "replaced at the cost of whoever lost them.",
    "Works that keep up the house or save energy are announced three months ahead, with what they are, how long they take and "
    "what the rent will be afterwards. Works that are urgent are borne without notice.",
    "The landlord may sell the house. The buyer takes his place in this contract, and the deposit goes over to him. The tenant "
    "has a right of first refusal if flats of the house are sold one by one.",
    "Post for the landlord goes to the office in Weir Street, by letter or by electronic mail; notices and rises of the rent by "
    "letter alone. A change of address is told within a week.",
    "Whoever is away for more than four weeks says who has a key and may be reached. Meters that cannot be read on the day that was "
    "announced twice are estimated, by the figures of the year before.",
    "If a clause is void the others stand. Changes to this contract are made in writing, and so is a waiver of that rule.",
]
CONTRACT = "\n".join(f"{number}. {text}" for number, text in enumerate(CLAUSES, 1))
HISTORY = [
    (
        f"This is a lease:\n\n{CONTRACT}\n\nWhat does clause 3 say about the rent?",
        '{"answer": "It is due on the third working day of the month.", "confidence": 98}',
    )
]
QUESTIONS = [
    "By when does the rent have to be there? Answer in JSON.",
    "May I keep a dog? Answer in JSON.",
]

backend = Runtime(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
set_default_backend(backend)


def legal_qa(question: str, history: list | None = None):
    if history is None:
        history = []
    with assistant():
        for q, _ in history:
            user(q)
            gen(name="answer", max_tokens=48)
        user(question)
        gen(name="response", regex=PATTERN, max_tokens=96)
    return backend.run(temperature=0)


def main() -> None:
    first_tokens = []
    for question in QUESTIONS:
        result = legal_qa(question, HISTORY)
        first, last = result.metas[0], result.meta("response")
        first_tokens.append(first.ttft)
        print(f"> {question}")
        print(result["response"])
        print(
            f"  [{first.cached_tokens} of {first.prompt_tokens} prompt tokens from the cache, first token after"
            f" {first.ttft:.2f} s, ended by {last.finish_reason}]\n"
        )
    share = first_tokens[1] / first_tokens[0]
    print(
        f"The second call's first token came in {share:.1%} of the first call's time. (Run again, both find the contract.)"
    )


if __name__ == "__main__":
    main()
